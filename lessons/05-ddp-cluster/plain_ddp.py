"""DDP in plain torch, without the course's library: the smallest program that uses all ranks.

torchrun --standalone --nproc-per-node=2 lessons/05-ddp-cluster/plain_ddp.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

has_gpu = torch.cuda.is_available()
backend = "nccl" if has_gpu else "gloo"
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
dist.init_process_group(backend)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1437], labels[:1437])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
ddp = DDP(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(train, seed=0)
loader = DataLoader(train, batch_size=32, sampler=sampler)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(ddp(x.to(device)), y.to(device)).backward()
        optimizer.step()

predictions = model(images[1437:].to(device)).argmax(1).cpu()
accuracy = (predictions == labels[1437:]).double().mean()
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, test accuracy {accuracy:.2f}")
del ddp  # before its group: DDP can hang if it drops the last reference to the group
dist.destroy_process_group()
