"""A linear layer as a LightningModule, batches of one tensor, and a quiet Trainer."""

import torch
import torch.nn.functional as F
from quiet import QUIET

import multigpu.trainer as L


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(batch), batch[:, :2])

    def validation_step(self, batch, batch_idx):
        self.log("v", F.mse_loss(self.layer(batch), batch[:, :2]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def rows(n=8):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


def trainer(folder=".", **more):
    return L.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder, **QUIET, **more}
    )
