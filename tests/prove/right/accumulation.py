"""DDP, three micro-batches a step, no_sync around forward and backward, clipping, warm-up."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO_BATCHES = 3

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

torch.manual_seed(0)
data = TensorDataset(torch.randn(192, 24), torch.randint(6, (192,)))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler, num_workers=1)

net = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 6))
ddp = DDP(net.to(device))
decay = [p for p in net.parameters() if p.dim() > 1]
others = [p for p in net.parameters() if p.dim() == 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))

for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % MICRO_BATCHES == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = F.cross_entropy(ddp(x.to(device)), y.to(device)) / MICRO_BATCHES
            loss.backward()
        if last:
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, batch {i}: loss {loss.item():.4f}, norm {norm:.4f}")
dist.destroy_process_group()
