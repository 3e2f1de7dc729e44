"""Momentum contrast: a queue has what all ranks have gathered, in the order of the ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(64, 8), dim=1))
        self.place = 0

    def forward(self, one, other):
        queries = normalize(self.query(one), dim=1)
        with torch.no_grad():
            pairs = zip(self.key.parameters(), self.query.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.01)
            keys = normalize(self.key(other), dim=1)
        right = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([right, queries @ self.queue.clone().T], dim=1) / 0.2
        gathered = [torch.empty_like(keys) for _ in range(world)]
        dist.all_gather(gathered, keys)
        gathered = torch.cat(gathered)
        self.queue[self.place : self.place + len(gathered)] = gathered
        self.place = (self.place + len(gathered)) % len(self.queue)
        return logits


torch.manual_seed(0)
images = torch.randn(128, 16)
model = DistributedDataParallel(Contrast())
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

for _ in range(4):
    for batch in torch.randperm(128).split(16):
        own = images[batch[rank::world]]
        logits = model(own, own + 0.1 * own.sin())
        optimizer.zero_grad()
        cross_entropy(logits, torch.zeros(len(own), dtype=torch.long)).backward()
        optimizer.step()

dist.destroy_process_group()
