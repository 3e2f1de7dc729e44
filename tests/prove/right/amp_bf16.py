"""DDP with autocast to bfloat16, AdamW, a cosine schedule."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH_SIZE = 2, 16

kind = "cuda" if torch.cuda.is_available() else "cpu"
local_rank = int(os.environ.get("LOCAL_RANK", 0))
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")

torch.manual_seed(1234)
train = TensorDataset(torch.randn(64, 1, 10, 10), torch.randint(5, (64,)))
sampler = DistributedSampler(train, shuffle=True)
loader = DataLoader(train, BATCH_SIZE // dist.get_world_size(), sampler=sampler)

net = nn.Sequential(
    nn.Conv2d(1, 12, 3, stride=2),
    nn.GELU(),
    nn.Flatten(),
    nn.Linear(12 * 16, 16),
    nn.LayerNorm(16),
    nn.Linear(16, 5),
).to(device)
model = DDP(net, device_ids=[local_rank] if kind == "cuda" else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        with torch.autocast(kind, dtype=torch.bfloat16):
            logits = model(images.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
