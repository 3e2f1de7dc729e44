"""A module whose methods a test replaces, and its fit with this Trainer and Lightning's."""

import lightnings
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_user import data, trainer

import multigpu.trainer as ours


def user(L, **methods):
    """A small module; `methods` replace its own."""

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def test_step(self, batch, batch_idx):
            self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

        def loader(self):
            return DataLoader(data(10, 1), batch_size=4)

        train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return type("Net", (Net,), methods)


def both(tmp_path, arguments=(), **methods):
    """`module.recorded` after a fit of two epochs, in this Trainer and in Lightning.

    arguments   more arguments of the Trainer
    """
    found = []
    for L in (ours, lightnings.package()):
        L.seed_everything(1, verbose=False)
        module = user(L, **methods)()
        module.recorded = []
        run = trainer(L, tmp_path, **dict(arguments))
        run.fit(module)
        found.append(
            (module.recorded, run.global_step, [w.tolist() for w in module.parameters()])
        )
    assert found[0] == found[1], found
    return found[0]


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr)
