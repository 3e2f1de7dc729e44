"""A pipeline: each rank has one stage, a batch goes through in four micro-batches."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 32), nn.Tanh())]
layers += [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
layers += [nn.Linear(32, 4)]
rows, labels = torch.randn(6, 16, 16), torch.randint(4, (6, 16))

per_stage = len(layers) // world
module = nn.Sequential(*layers[rank * per_stage : (rank + 1) * per_stage]).to(device)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

if world > 1:
    stage = PipelineStage(module, rank, world, device)
    schedule_class = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=F.cross_entropy)

for step in range(6):
    x, y = rows[step].to(device), labels[step].to(device)
    optimizer.zero_grad()
    losses = []
    if world == 1:
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        losses.append(loss)
    elif rank == 0:
        schedule.step(x)
    elif rank == world - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    if rank == world - 1:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")
dist.destroy_process_group()
