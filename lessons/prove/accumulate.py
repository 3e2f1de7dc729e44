"""Train with gradient accumulation on all ranks, and with a fault: the flag comes too late.

torchrun --nproc-per-node=2 lessons/prove/accumulate.py [--right] [--dropout 0.1]
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--right", action="store_true", help="set the flag before forward")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float() / 16
torch.manual_seed(0)
layers = nn.Linear(64, 64), nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(64, 10)
model = DDP(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# A step takes 240 images, in micro-batches of 30; the ranks share them.
for step in range(7):
    micro_batches = torch.arange(step * 240, (step + 1) * 240).split(30)[rank::ranks]
    for number, rows in enumerate(micro_batches):
        is_last = number == len(micro_batches) - 1
        if args.right:
            model.require_backward_grad_sync = is_last
        loss = F.cross_entropy(model(images[rows]), labels[rows]) / len(micro_batches)
        # Only the last backward must synchronize. But DDP has decided in forward.
        model.require_backward_grad_sync = is_last
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
