"""DDP, gradients clipped to a norm, AdamW with a warm-up and a cosine."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

BATCH, STEPS, MAX_NORM = 32, 10, 0.5

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
data = torch.randn(STEPS, BATCH, 20, generator=generator)
targets = data.square().sum(2, keepdim=True) / 10 + data[..., :1]

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=3)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 3)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])

for step in range(STEPS):
    x, y = data[step, rank::world], targets[step, rank::world]
    optimizer.zero_grad()
    loss = mse_loss(model(x), y)
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    scheduler.step()

dist.destroy_process_group()
