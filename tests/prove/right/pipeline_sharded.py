"""Pipelines of two stages, each sharded by FSDP2; the layers have the names of the model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
place, dp = mesh["pp"].get_local_rank(), mesh["dp"]


def block(inputs, outputs):
    return nn.Sequential(nn.LayerNorm(inputs), nn.Linear(inputs, outputs), nn.Tanh())


torch.manual_seed(0)
images, labels = torch.randn(128, 20), torch.randint(10, (128,))
layers = [block(20, 32), block(32, 32), block(32, 32), nn.Linear(32, 10)]
names = [str(number) for number in range(4)]
own = slice(2 * place, 2 * place + 2)
model = nn.Sequential()
for name, layer in list(zip(names, layers, strict=True))[own]:
    model.add_module(name, fully_shard(layer, mesh=dp))
fully_shard(model, mesh=dp)
stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
schedule = Schedule1F1B(stage, 4, loss_fn=cross_entropy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for _ in range(4):
    for batch in torch.randperm(128).split(32):
        mine = batch[dp.get_local_rank() :: dp.size()]
        if place == 0:
            schedule.step(images[mine])
        else:
            schedule.step(target=labels[mine])
        optimizer.step()
        optimizer.zero_grad()

dist.destroy_process_group()
