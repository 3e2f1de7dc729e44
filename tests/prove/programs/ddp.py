"""A classifier with DDP. A batch has 32 rows, however many ranks share it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS, BATCH, EPOCHS = 128, 32, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(20, 64)
        self.middle = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.hidden(x).relu()
        x = self.middle(x).relu()
        return self.head(x)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(0)
x = torch.randn(ROWS, 20, generator=generator)
y = (x @ torch.randn(20, 10, generator=generator)).argmax(1)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)

torch.manual_seed(0)
net = Net()
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

dist.destroy_process_group()
