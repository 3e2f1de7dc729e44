"""Train on all GPUs with DDP, in plain torch. one_gpu.py is the same training on one GPU.

torchrun --standalone --nproc-per-node=2 lessons/05-ddp-cluster/ddp.py weights.pt
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group: see the end
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

has_gpu = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1440], labels[:1440])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
ddp = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(train, seed=0)
loader = DataLoader(train, batch_size=120 // ranks, sampler=sampler)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(ddp(x.to(device)), y.to(device)).backward()
        optimizer.step()

predictions = model(images[1440:].to(device)).argmax(1).cpu()
accuracy = (predictions == labels[1440:]).double().mean()
if rank == 0:
    print(f"{ranks} × {device.type}, test accuracy {accuracy:.2f}")
    torch.save(model.state_dict(), sys.argv[1])
# Without this line, and the import of functional, gloo's threads can abort or hang the end.
del ddp
dist.destroy_process_group()
