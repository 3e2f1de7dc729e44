"""One process, a model whose first layers are on cuda:0 and whose last ones are on cuda:1."""

import torch
import torch.nn.functional as F
from torch import nn


class TwoGPUs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.GELU()).to("cuda:0")
        self.last = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 5)).to("cuda:1")

    def forward(self, x):
        hidden = self.first(x.to("cuda:0"))
        return self.last(hidden.to("cuda:1"))


torch.manual_seed(0)
rows = torch.randn(128, 32)
labels = torch.randint(5, (128,))
model = TwoGPUs()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(8):
    batch = slice(16 * step, 16 * (step + 1))
    loss = F.cross_entropy(model(rows[batch]), labels[batch].to("cuda:1"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
