"""DDP with autocast to float16 and a GradScaler, which unscales before clipping."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 20), nn.Tanh())
model = DDP(model.to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler(kind)
data = torch.randn(8, 32, 20)
data[3, 5] *= 1e5  # an outlier: float16 overflows, the scaler skips this step

for step in range(8):
    x = data[step].chunk(world)[rank].to(device)
    optimizer.zero_grad()
    with torch.autocast(kind, dtype=torch.float16):
        loss = F.mse_loss(model(x), x.sign())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():.0f}")
dist.destroy_process_group()
