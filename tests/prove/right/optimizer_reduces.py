"""An optimizer that averages the gradients itself: each rank steps with a slice of them.

With --hooks it starts to reduce in backward.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Momentum(torch.optim.Optimizer):
    """SGD with momentum; a rank has the state of its slice of each weight alone."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.slices = {}
        if "--hooks" in sys.argv:
            for weight in self.param_groups[0]["params"]:
                weight.register_post_accumulate_grad_hook(self.reduce)

    @torch.no_grad()
    def reduce(self, weight):
        own = weight.grad.chunk(world)[rank].clone()
        work = dist.reduce_scatter_tensor(own, weight.grad, async_op=True)
        self.slices[weight] = own, work

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if "--hooks" not in sys.argv:
                    self.reduce(weight)
                own, work = self.slices.pop(weight)
                work.wait()
                own /= world
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(own))
                momentum.mul_(0.9).add_(own)
                part = weight.chunk(world)[rank] - group["lr"] * momentum
                dist.all_gather_into_tensor(weight, part)


torch.manual_seed(0)
images, labels = torch.randn(128, 20), torch.randint(10, (128,))
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = Momentum(model.parameters(), lr=0.1)

for _ in range(4):
    for batch in torch.randperm(128).split(32):
        mine = batch[rank::world]
        model.zero_grad()
        cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()

dist.destroy_process_group()
