"""Train on one GPU, in plain torch. ddp.py is the same training on all GPUs.

python lessons/05-ddp-cluster/one_gpu.py weights.pt
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

has_gpu = torch.cuda.is_available()
device = torch.device("cuda" if has_gpu else "cpu")

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1440], labels[:1440])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = RandomSampler(train, generator=torch.Generator())
loader = DataLoader(train, batch_size=120, sampler=sampler)

for epoch in range(10):
    sampler.generator.manual_seed(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()

predictions = model(images[1440:].to(device)).argmax(1).cpu()
accuracy = (predictions == labels[1440:]).double().mean()
print(f"1 × {device.type}, test accuracy {accuracy:.2f}")
torch.save(model.state_dict(), sys.argv[1])
