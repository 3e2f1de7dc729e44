"""What a second review found: each was wrong once."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import multigpu.trainer as L
from multigpu import launch

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


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
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 4, generator=random), torch.randn(n, 1, generator=random))


def batches(n: int = 40, size: int = 4) -> DataLoader:
    return DataLoader(rows(n), size)


def trained(model: Net, *loaders, **keywords) -> L.Trainer:
    trainer = L.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **QUIET, **keywords})
    trainer.fit(model, *(loaders or [batches()]))
    return trainer


# ---- on two ranks ----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "z squares")


def of_all(z: torch.Tensor) -> torch.Tensor:
    return (z.mean() - 3.0) ** 2 + (z**2).mean()


class Contrast(Net):
    """A loss over all ranks' rows, as SimCLR's."""

    def training_step(self, batch, batch_idx):
        z = self.layer(batch[0])
        found = self.all_gather({"pair": Pair(z, [z**2])}, sync_grads=True)["pair"]
        return (found.z.mean() - 3.0) ** 2 + found.squares[0].mean()

    def on_before_optimizer_step(self, optimizer):
        self.gradient = self.layer.weight.grad.clone()


def on_two_ranks() -> dict:
    found = {}
    model = Contrast()
    trained(model, batches(8), strategy="ddp", max_steps=1)
    found["gathered"] = model.gradient
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(on_two_ranks, 2)


def test_gradients_through_all_gather_are_those_of_one_process(two):
    model = Net()
    of_all(model.layer(rows(8).tensors[0])).backward()
    for rank in two:
        assert torch.allclose(rank["gathered"], model.layer.weight.grad)
