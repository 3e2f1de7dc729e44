"""ZeRO-1 by hand: each rank's optimizer has an equal part of each weight."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))

torch.manual_seed(0)
images, labels = torch.randn(128, 20), torch.randint(10, (128,))
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
weights = list(model.parameters())


def part(whole):
    return whole.view(-1).chunk(world)[rank]


parts = [
    nn.Parameter(DTensor.from_local(part(weight.data), mesh, [Shard(0)])) for weight in weights
]
optimizer = torch.optim.Adam(parts, lr=0.01)

for _ in range(2):
    for batch in torch.randperm(128).split(32):
        mine = batch[rank::world]
        loss = cross_entropy(model(images[mine]), labels[mine])
        model.zero_grad()
        loss.backward()
        for weight, own in zip(weights, parts, strict=True):
            dist.all_reduce(weight.grad)
            mean = part(weight.grad) / world
            own.grad = DTensor.from_local(mean, mesh, [Shard(0)])
        optimizer.step()
        for weight, own in zip(weights, parts, strict=True):
            dist.all_gather(list(weight.data.view(-1).chunk(world)), own.data.to_local())

dist.destroy_process_group()
