"""Limits: less than one batch, no batches, endless data, several steps in one batch."""

import pytest
import small_net
import torch
from regression_net import Net, batches, trained
from torch.utils.data import DataLoader

from multigpu.errors import UserError


@pytest.mark.parametrize(
    "name", ["limit_train_batches", "limit_val_batches", "overfit_batches"]
)
def test_a_share_of_less_than_one_batch(name):
    with pytest.raises(UserError, match=f"{name}=0.05 of 10 batches .*less than one"):
        trained(Net(), batches(), batches(), **{name: 0.05})
    assert trained(Net(), batches(), batches(), **{name: 0.1}).global_step


def test_an_endless_loader_has_endless_steps():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from small_net.rows(4)

    model, found = small_net.make_net(), []
    model.on_train_start = lambda: found.append(model.trainer.estimated_stepping_batches)
    small_net.cpu(max_epochs=1).fit(model, DataLoader(Endless(), 2))
    assert found == [float("inf")]
    assert (
        small_net.cpu(fast_dev_run=True, check_val_every_n_epoch=5).check_val_every_n_epoch
        == 1
    )


class Two(Net):
    """Two optimizers, which each step once a batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_max_steps_ends_a_batch_that_makes_several():
    assert trained(Two(), max_steps=5, max_epochs=-1).global_step == 6
    assert trained(Two(), max_epochs=1).global_step == 20
