"""A mistake that stands still with NCCL: rank 0 calls one all-reduce more than rank 1.

multigpu virtual --gpus 2 --timeout 5 torchrun --nproc-per-node=2 stands_still.py
"""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
loss = torch.rand(1, device="cuda")
dist.all_reduce(loss, op=dist.ReduceOp.AVG)
if rank == 0:
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    print(f"loss {loss.item():.2f}")
dist.destroy_process_group()
