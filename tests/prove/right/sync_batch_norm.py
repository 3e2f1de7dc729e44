"""A CNN with BatchNorm, converted to SyncBatchNorm, in DDP; for GPUs."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")

torch.manual_seed(7)
images = torch.randn(96, 3, 8, 8)
labels = torch.randint(10, (96,))
data = TensorDataset(images, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(8 * 16, 10),
)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)

model.train()
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    loss.backward()
    optimizer.step()
    if local_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
