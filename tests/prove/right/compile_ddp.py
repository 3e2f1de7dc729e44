"""torch.compile of a model in DDP."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="inductor")
parser.add_argument("--inside", action="store_true", help="compile, then wrap in DDP")
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
else:
    device = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.mixer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(24)
        self.out = nn.Linear(24, 30)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + F.gelu(self.mixer(x.transpose(1, 2)).transpose(1, 2))
        return self.out(self.norm(x))


torch.manual_seed(0)
net = Net().to(device)
if args.inside:
    model = DDP(torch.compile(net, backend=args.backend))
else:
    model = torch.compile(DDP(net), backend=args.backend)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
tokens = torch.randint(30, (6, 16, 9))

for step in range(6):
    batch = tokens[step].chunk(world)[rank].to(device)
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
