"""A small classifier as a LightningModule, its data, and a Trainer that prints nothing."""

import torch
import torch.nn.functional as F
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer as L


class Net(L.LightningModule):
    def __init__(self, norm: bool = False, manual: bool = False):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 3))
        if norm:
            self.layer.append(torch.nn.BatchNorm1d(3))
        self.automatic_optimization = not manual
        self.seen: list = []

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("l", loss, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.05)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def rows(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    y = torch.randint(0, 3, (n,), generator=generator)
    return TensorDataset(x, y)


def make_net(seed: int = 0, **keywords) -> Net:
    torch.manual_seed(seed)
    return Net(**keywords)


def cpu(**keywords) -> L.Trainer:
    return L.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **QUIET, **keywords})


def loaders(n: int = 8):
    return DataLoader(rows(n), 2), DataLoader(rows(4), 2)


def fitted(model: Net, **keywords) -> L.Trainer:
    trainer = cpu(**keywords)
    trainer.fit(model, *loaders())
    return trainer
