"""Micro-batches with DDP: more ranks, fewer micro-batches; a step has 48 rows in all."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, BATCH, MICRO_BATCH, STEPS = 240, 48, 6, 10

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
micro_batches = BATCH // (MICRO_BATCH * world)

generator = torch.Generator().manual_seed(0)
data = torch.randn(ROWS, 20, generator=generator)
labels = (data @ torch.randn(20, 10, generator=generator)).argmax(1)
position = rank * MICRO_BATCH


def next_batch():
    global position
    rows = torch.arange(position, position + MICRO_BATCH) % ROWS
    position += MICRO_BATCH * world
    return data[rows], labels[rows]


torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for _ in range(STEPS):
    optimizer.zero_grad()
    for micro in range(micro_batches):
        x, y = next_batch()
        last = micro == micro_batches - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = cross_entropy(model(x), y) / micro_batches
            loss.backward()
    optimizer.step()

dist.destroy_process_group()
