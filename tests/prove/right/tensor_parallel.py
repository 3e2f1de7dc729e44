"""Tensor parallelism: attention and MLP are split over the ranks, which read the same rows."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, HEAD_WIDTH = 32, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        h = self.norm1(x)
        heads = [f(h).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for f in self.qkv()]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def qkv(self):
        return self.q, self.k, self.v


kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, WIDTH), Block(), nn.Linear(WIDTH, 40)).to(kind)
plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
plan |= {"o": RowwiseParallel(), "down": RowwiseParallel()}
parallelize_module(model[1], mesh, plan)
# Embedding, norms and the last layer are plain tensors, equal on all ranks.
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)

tokens = torch.randint(40, (8, 6, 11), device=kind)
for step in range(8):
    logits = model(tokens[step, :, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if mesh.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
