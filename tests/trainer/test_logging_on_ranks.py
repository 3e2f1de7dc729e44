"""self.log on two ranks: sync_dist, different names, a scheduler that reads the values."""

import numbered_rows
import pytest
import torch
import torch.nn.functional as F
from regression_net import Net, batches, trained
from torch.utils.data import DataLoader

from multigpu import launch

pytestmark = pytest.mark.filterwarnings("ignore")


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


def log_differently(folder, rank):
    def step(net, batch, batch_idx):
        net.log("both", 1.0 + rank, on_step=True, on_epoch=True, sync_dist=True)
        net.log(
            "this" if rank else "that", 5.0 + rank, on_step=True, on_epoch=True, sync_dist=True
        )
        if batch_idx == 1 and rank == 1:
            net.log("seldom", 4.0, on_step=False, on_epoch=True, reduce_fx="sum")

    run = numbered_rows.trainer(folder, log_every_n_steps=1, strategy="ddp", devices=2)
    run.fit(numbered_rows.Net(train=step), DataLoader(numbered_rows.Rows(8), 2))
    return {name: float(value) for name, value in run.callback_metrics.items()}


def logs(folder: str) -> dict:
    found: dict = {"logged": log_differently(folder, launch.find_world().rank)}
    for sync in (True, False):
        model = Plateau(sync)
        trainer = trained(model, batches(80), strategy="ddp")
        found[f"rate, sync_dist={sync}"] = trainer.optimizers[0].param_groups[0]["lr"]
        found[f"weight, sync_dist={sync}"] = model.layer.weight.detach()
        found[f"seen, sync_dist={sync}"] = model.seen
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks finds in `logs`."""
    return launch.call(logs, 2, str(tmp_path_factory.mktemp("two")))


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


def test_ranks_may_log_different_names(two):
    """The epoch's values, and a step's with sync_dist, are over those ranks that have logged
    the name: on every rank.
    """
    for rank in two:
        assert rank["logged"] == {
            "both": 1.5,
            "both_step": 1.5,
            "both_epoch": 1.5,
            "seldom": 4.0,
            "that": 5.0,
            "that_step": 5.0,
            "that_epoch": 5.0,
            "this": 6.0,
            "this_step": 6.0,
            "this_epoch": 6.0,
        }
