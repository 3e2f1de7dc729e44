"""What is validated, gathered, scheduled and limited: each test is for a past bug."""

import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from regression_net import Net, batches, rows, trained
from torch.utils.data import DataLoader

from multigpu import launch
from multigpu.errors import UserError

# ---- on two ranks ---------------------------------------------------------------------------

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


class Plateau(Net):
    """Its learning rate falls by what the steps' losses do."""

    def __init__(self, sync: bool):
        super().__init__()
        self.sync, self.seen = sync, []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=self.sync)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0
        )
        return [optimizer], [
            {"scheduler": scheduler, "monitor": "train_loss", "interval": "step"}
        ]


class Late(Plateau):
    """Rank 1 asks for sync_dist, from the second step on, and rank 0 logs nothing: nobody
    waits for ever.
    """

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        if self.global_rank == 1 and batch_idx:
            self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics.get("train_loss", 0.0)))

    configure_optimizers = Net.configure_optimizers


def on_two_ranks() -> dict:
    found = {}
    for sync in (True, False):
        model = Plateau(sync)
        trainer = trained(model, batches(80), strategy="ddp")
        found[f"rate, sync_dist={sync}"] = trainer.optimizers[0].param_groups[0]["lr"]
        found[f"weight, sync_dist={sync}"] = model.layer.weight.detach()
        found[f"seen, sync_dist={sync}"] = model.seen
    model = Late(True)
    trained(model, batches(80), strategy="ddp", log_every_n_steps=5)
    found["seen late"] = model.seen
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


@pytest.mark.parametrize("sync", [True, False])
def test_a_plateau_by_step_steps_alike_on_all_ranks(two, sync):
    first, second = two
    assert first[f"rate, sync_dist={sync}"] == second[f"rate, sync_dist={sync}"] < 0.1
    assert torch.equal(first[f"weight, sync_dist={sync}"], second[f"weight, sync_dist={sync}"])


def test_with_sync_dist_each_steps_value_is_all_ranks(two):
    first, second = two
    assert len(first["seen, sync_dist=True"]) == 10
    assert first["seen, sync_dist=True"] == second["seen, sync_dist=True"]
    assert first["seen, sync_dist=False"] != second["seen, sync_dist=False"]


def test_ranks_agree_to_exchange_though_one_alone_asks_for_it(two):
    first, second = two
    assert (
        first["seen late"][:2] == [0.0, 0.0]
        and first["seen late"][2:] == second["seen late"][2:]
    )
    assert len(set(first["seen late"][2:])) == 8


# ---- in one process -------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "name", ["limit_train_batches", "limit_val_batches", "overfit_batches"]
)
def test_a_share_of_less_than_one_batch(name):
    with pytest.raises(UserError, match=f"{name}=0.05 of 10 batches .* at least 0.1"):
        trained(Net(), batches(), batches(), **{name: 0.05})
    assert trained(Net(), batches(), batches(), **{name: 0.1}).global_step


def test_the_least_share_that_is_told_is_one_batch():
    with pytest.raises(UserError, match=r"give at least 0\.021"):
        trained(Net(), batches(49, 1), limit_train_batches=0.01)
    assert trained(Net(), batches(49, 1), limit_train_batches=0.021).global_step == 1


def test_a_training_dataloader_without_batches():
    with pytest.warns(UserWarning, match=r"no batches.* nothing is learned"):
        trained(Net(), DataLoader(rows(3), 4, drop_last=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(Net(), batches(), batches(), limit_train_batches=0)


def test_metrics_are_there_in_the_sanity_check_and_gone_after_it():
    seen = {}

    class Looks(Net):
        def on_validation_epoch_end(self):
            seen.setdefault("sanity", float(self.trainer.callback_metrics["val_loss"]))

        def on_train_start(self):
            trainer = self.trainer
            seen["after"] = {
                **trainer.callback_metrics,
                **trainer.logged_metrics,
                **trainer.progress_bar_metrics,
            }

    trained(Looks(), batches(), batches())
    assert seen["sanity"] > 0 and seen["after"] == {}
