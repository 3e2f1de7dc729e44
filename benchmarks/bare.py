"""The shortest DDP training written by hand, for comparison with the Trainer: bare.py DATA."""

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


# A copy of multigpu.models.CNN, because importing it would take time.
class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1, stride=2)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(images))))
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


dist.init_process_group("gloo")
with np.load(sys.argv[1]) as file:
    train = TensorDataset(
        torch.from_numpy(file["x_train"])[:, None], torch.from_numpy(file["y_train"])
    )
model = DDP(CNN())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for images, labels in DataLoader(train, batch_size=32, sampler=DistributedSampler(train)):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
dist.destroy_process_group()
