"""DDP with ZeroRedundancyOptimizer: each rank keeps Adam's state of a part of the weights."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
layers = []
for _ in range(3):
    layers += [nn.Linear(32, 32), nn.GELU()]
model = DDP(nn.Sequential(*layers, nn.Linear(32, 4)).to(device))
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3
)

x = torch.randn(160, 32)
y = x[:, :4].softmax(1)
for step in range(8):
    rows = range(20 * step + rank, 20 * (step + 1), world)
    loss = F.cross_entropy(model(x[list(rows)].to(device)), y[list(rows)].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
