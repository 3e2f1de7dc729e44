"""Data parallelism without DDP: the gradients are averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

ROWS, BATCH, EPOCHS = 128, 32, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(20, 64)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.scale * self.hidden(x).tanh())


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
data = torch.randn(ROWS, 20, generator=generator)
labels = (data @ torch.randn(20, 10, generator=generator)).argmax(1)

torch.manual_seed(0)
net = Net()
for p in net.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

for epoch in range(EPOCHS):
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(BATCH):
        share = len(batch) // world
        rows = batch[rank * share : (rank + 1) * share]
        loss = cross_entropy(net(data[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()

dist.destroy_process_group()
