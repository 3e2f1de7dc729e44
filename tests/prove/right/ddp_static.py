"""DDP with its options: static graph, bucket views, unused parameters, a hook."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--static-graph", action="store_true")
parser.add_argument("--bucket-view", action="store_true")
parser.add_argument("--find-unused", action="store_true")
parser.add_argument("--hook", choices=["allreduce", "bf16_compress"])
args = parser.parse_args()

local_rank = int(os.environ["LOCAL_RANK"])
cuda = torch.cuda.is_available()
device = f"cuda:{local_rank}" if cuda else "cpu"
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 64)
        self.heads = nn.ModuleList([nn.Linear(64, 4), nn.Linear(64, 4)])

    def forward(self, x, head):
        hidden = torch.relu(self.body(x))
        return self.heads[head](hidden) if head >= 0 else sum(h(hidden) for h in self.heads)


torch.manual_seed(0)
model = DDP(
    TwoHeads().to(device),
    static_graph=args.static_graph,
    gradient_as_bucket_view=args.bucket_view,
    find_unused_parameters=args.find_unused,
)
if args.hook:
    model.register_comm_hook(None, getattr(default_hooks, f"{args.hook}_hook"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
rows, labels = torch.randn(8, 16, 16), torch.randint(4, (8, 16))

for step in range(8):
    x, y = rows[step][rank::world].to(device), labels[step][rank::world].to(device)
    logits = model(x, head=step % 2 if args.find_unused else -1)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
