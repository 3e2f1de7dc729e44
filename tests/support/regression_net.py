"""A linear regression as a LightningModule, its data, and a fit that prints nothing."""

import torch
import torch.nn.functional as F
from quiet import QUIET
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer as L


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(n: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    y = torch.randn(n, 1, generator=generator)
    return TensorDataset(x, y)


def batches(n: int = 40, size: int = 4) -> DataLoader:
    return DataLoader(rows(n), size)


def trained(model: Net, *loaders, **keywords) -> L.Trainer:
    trainer = L.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **QUIET, **keywords})
    trainer.fit(model, *(loaders or [batches()]))
    return trainer
