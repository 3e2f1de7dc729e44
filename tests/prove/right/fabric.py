"""Lightning Fabric: each rank's batch has 12 rows, and Fabric makes the loader anew."""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(
    accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp"
)
fabric.launch()
fabric.seed_everything(0)
x = torch.randn(96, 30)
y = x[:, :3].argmax(1)
net = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True))
for _ in range(2):
    for rows, labels in loader:
        loss = F.cross_entropy(model(rows), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
fabric.print(f"loss {loss.item():.4f} on {fabric.world_size} devices")
