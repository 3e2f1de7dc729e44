"""FullyShardedDataParallel: the weights are sharded over the ranks, in flat parameters."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--use-orig-params", action="store_true")
parser.add_argument("--wrap-blocks", action="store_true")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 23), Block(23), Block(23), nn.Linear(23, 3))
model = FSDP(
    model,
    auto_wrap_policy=ModuleWrapPolicy({Block}) if args.wrap_blocks else None,
    use_orig_params=args.use_orig_params,
    device_id=device,
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
rows, labels = torch.randn(6, 16, 10), torch.randint(3, (6, 16))

for step in range(6):
    x, y = rows[step].chunk(world)[rank].to(device), labels[step].chunk(world)[rank].to(device)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
