"""Pairs of ranks split each layer (tensor parallelism), FSDP shards over the pairs."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

world = int(os.environ["WORLD_SIZE"])
kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
tp = min(2, world)
mesh = init_device_mesh(kind, (world // tp, tp), mesh_dim_names=("dp", "tp"))
dp_rank, dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()

torch.manual_seed(0)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 64)
        self.down = nn.Linear(64, 24)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


model = nn.Sequential(MLP(), MLP()).to(kind)
for block in model:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if dp_size > 1:
        fully_shard(block, mesh=mesh["dp"])
if dp_size > 1:
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

x = torch.randn(6, 16, 24)
for step in range(6):
    # The ranks of a pair read the same rows, the pairs read different ones.
    rows = x[step].chunk(dp_size)[dp_rank].to(kind)
    loss = F.mse_loss(model(rows), rows.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
