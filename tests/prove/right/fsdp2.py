"""fully_shard on each block and on the root; optionally in bfloat16, or replicated too."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--hybrid", action="store_true", help="two groups hold the same shards")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(kind, (world,))
if args.hybrid and world > 1:
    mesh = init_device_mesh(kind, (2, world // 2), mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    def __init__(self, width=21):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 21), Block(), Block(), nn.Linear(21, 1)).to(kind)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
policy = policy if args.bf16 else MixedPrecisionPolicy()
for block in model[1:3]:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

rows = torch.randn(6, args.accumulate, 16, 8)
for step in range(6):
    for i in range(args.accumulate):
        x = rows[step, i][rank::world].to(kind)
        model.set_requires_gradient_sync(i == args.accumulate - 1)
        loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True)) / args.accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
