"""InfoNCE: a row's pair is found among the embeddings of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS = 32, 8


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 16))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return normalize(self.body(x)), self.temperature.exp()


def gather(z):
    return torch.cat(all_gather(z)) if world > 1 else z


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
data = torch.randn(STEPS, BATCH, 20, generator=generator)
noise = torch.randn(2, STEPS, BATCH, 20, generator=generator)
first, second = data + 0.5 * noise

torch.manual_seed(0)
model = DDP(Encoder())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

share = BATCH // world
for step in range(STEPS):
    rows = slice(rank * share, (rank + 1) * share)
    z, temperature = model(torch.cat([first[step, rows], second[step, rows]]))
    a, b = map(gather, z.chunk(2))
    logits = temperature * a @ b.T
    loss = cross_entropy(logits, torch.arange(BATCH))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

dist.destroy_process_group()
