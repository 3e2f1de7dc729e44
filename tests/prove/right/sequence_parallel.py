"""Tensor and sequence parallelism: between the MLPs each rank has a part of each sequence."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(36, 24)
        self.blocks = nn.Sequential(Block(24), Block(24))
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 36)

    def forward(self, tokens):
        return self.out(self.norm(self.blocks(self.embedding(tokens))))


kind = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))

torch.manual_seed(0)
model = Model().to(kind)
plan = {
    "embedding": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": tp.SequenceParallel(),
    "blocks.*.up": tp.ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": tp.RowwiseParallel(output_layouts=Shard(1)),
    "norm": tp.SequenceParallel(),
    "out": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
tp.parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

for step in range(6):
    tokens = torch.randint(36, (4, 9), device=kind)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if mesh.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
