"""A program that gpu_sections/prove.py proves: DDP over gloo, its ranks share one GPU.

torchrun --nproc-per-node=2 prove_program.py DEVICE MODEL PRECISION [own]

A batch has 32 rows, however many ranks share it. With `own` the ranks do not average.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workloads import HALF, TINY, loss_of, new_batch, new_model

BATCH, STEPS = 32, 10

kind, name, precision, *fault = sys.argv[1:]
device = torch.device(kind)
torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
torch.backends.cudnn.allow_tf32 = precision == "tf32"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

net = new_model(name, TINY).to(device)
model = net if fault else DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler(kind, enabled=precision == "fp16")
for step in range(STEPS):
    inputs, labels = new_batch(name, TINY, BATCH, device, seed=step)
    batch = inputs[rank::world], labels[rank::world]
    with torch.autocast(kind, HALF.get(precision), enabled=precision in HALF):
        loss = loss_of(model, batch)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
dist.destroy_process_group()
