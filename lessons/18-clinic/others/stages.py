"""Two stages of a pipeline: rank 0 sends each micro-batch's activations to rank 1.

torchrun --standalone --nproc-per-node=2 lessons/18-clinic/others/stages.py
"""

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=6))

torch.manual_seed(0)
images = torch.rand(150, 64).to(device)
stage = (torch.nn.Linear(64, 32) if rank == 0 else torch.nn.Linear(32, 10)).to(device)
with torch.no_grad():
    if rank == 0:
        for part in range(len(images) // 32):
            hidden = stage(images[32 * part : 32 * part + 32])
            dist.send(hidden, 1)
    else:
        for part in range(math.ceil(len(images) / 32)):
            hidden = torch.empty(32, 32, device=device)
            dist.recv(hidden, 0)
            print(f"micro-batch {part}: {stage(hidden).argmax(1)[:4].tolist()}", flush=True)
dist.destroy_process_group()
