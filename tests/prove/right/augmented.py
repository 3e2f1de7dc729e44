"""DDP with rows that are drawn at random, in worker processes too, and with dropout."""

import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Noisy(Dataset):
    """Rows with noise of each generator."""

    def __init__(self):
        self.x = torch.randn(72, 20, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        row = self.x[number] + torch.randn(20) + random.random()
        return row + np.random.rand(20).astype("float32"), int(self.x[number].argmax()) % 4


dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(0)
train = Subset(Noisy(), range(4, 64))
model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Dropout(0.3), nn.Linear(30, 4))
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
sampler = DistributedSampler(train)
loader = DataLoader(train, 12 // ranks, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
