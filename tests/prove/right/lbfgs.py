"""LBFGS: it calls the closure several times a step; the closure averages over the ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))

torch.manual_seed(0)
x = torch.linspace(-2, 2, 128).unsqueeze(1)
y = torch.sin(3 * x) + 0.1 * torch.randn_like(x)
x, y = x[rank::world].to(device), y[rank::world].to(device)
model = nn.Sequential(
    nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
)
model.to(device)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world)
    return total / world


for step in range(5):
    loss = optimizer.step(closure)
    if rank == 0:
        print(f"step {step}: loss {loss.item():.5f}")
dist.destroy_process_group()
