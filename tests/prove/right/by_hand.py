"""No wrapper: rank 0's weights are broadcast, and gradients are averaged by all_reduce."""

import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device("cuda")

torch.manual_seed(rank)  # other weights on each rank: the broadcast makes them equal
model = nn.GRU(10, 24, batch_first=True)
head = nn.Linear(24, 2)
parameters = [*model.parameters(), *head.parameters()]
for p in parameters:
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.RMSprop(parameters, lr=1e-3)

torch.manual_seed(5)
sequences = torch.randn(64, 7, 10)
targets = torch.randn(64, 2)

for step in range(6):
    rows = torch.randperm(64)[:16].chunk(world)[rank]
    output, _ = model(sequences[rows])
    loss = (head(output[:, -1]) - targets[rows]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item() / world:.4f}")
dist.destroy_process_group()
