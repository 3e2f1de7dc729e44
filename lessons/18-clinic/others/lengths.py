"""Reads sequences of other lengths, sorted, so that those of a batch are about as long.

torchrun --standalone --nproc-per-node=2 lessons/18-clinic/others/lengths.py
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
lengths = torch.randint(1, 33, (64,)).sort().values
cell, head = torch.nn.RNNCell(1, 16).to(device), torch.nn.Linear(16, 2).to(device)
weights = [*cell.parameters(), *head.parameters()]
for batch in lengths.split(16):
    mine = batch.chunk(ranks)[rank].tolist()
    rows = torch.rand(len(mine), max(mine), 1, device=device)
    labels = (rows.mean((1, 2)) > 0.5).long()
    hidden = torch.zeros(len(mine), 16, device=device)
    for step in range(max(mine)):
        hidden = cell(rows[:, step], hidden)
    F.cross_entropy(head(hidden), labels).backward()
    for weight in weights:
        dist.all_reduce(weight.grad)
        weight.data -= 0.1 * weight.grad / ranks
        weight.grad = None
dist.destroy_process_group()
