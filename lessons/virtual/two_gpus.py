"""A model on two GPUs, as a CUDA script has it: a layer on cuda:0 and one on cuda:1."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
first = nn.Linear(1024, 4096).to("cuda:0")
second = nn.Linear(4096, 10).to("cuda:1")
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
images = torch.randn(512, 1024)
labels = torch.randint(10, (512,))

for step in range(3):
    optimizer.zero_grad()
    hidden = first(images.to("cuda:0")).relu()
    logits = second(hidden.to("cuda:1"))
    loss = F.cross_entropy(logits, labels.to("cuda:1"))
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
