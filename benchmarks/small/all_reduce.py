"""Add up a number over all ranks: two ranks print 3."""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
number = torch.tensor([rank + 1.0]).cuda()
dist.all_reduce(number)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {number.item():.0f}\n", end="")
dist.destroy_process_group()
