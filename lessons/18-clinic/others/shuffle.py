"""Shuffles the images anew in each epoch; each rank takes its part of each batch.

torchrun --standalone --nproc-per-node=2 lessons/18-clinic/others/shuffle.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=6))

torch.manual_seed(0)
images = torch.rand(256, 64).to(device)
labels = images[:, :10].argmax(1)
model = torch.nn.Linear(64, 10).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
draw = torch.Generator().manual_seed(rank)
for epoch in range(2):
    order = torch.randperm(256, generator=draw).to(device)
    for rows in order.split(32):
        mine = rows[rank::ranks]
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
