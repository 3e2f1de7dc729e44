"""Autocast in float16 with a GradScaler: the first three steps overflow and are skipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

BATCH, STEPS = 32, 12

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
data = 8 * torch.randn(STEPS, BATCH, 20, generator=generator)
labels = (data @ torch.randn(20, 10, generator=generator)).argmax(2)

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

for step in range(STEPS):
    x, y = data[step, rank::world], labels[step, rank::world]
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

dist.destroy_process_group()
