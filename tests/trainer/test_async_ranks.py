"""bagua:async under the Trainer: no rank waits within an epoch, and all stop together."""

import time
from pathlib import Path

import pytest
import torch
from numbered_rows import Rows, Stream, trainer
from refusals import user_error
from torch.utils.data import DataLoader

import multigpu.trainer as L
from multigpu import launch
from multigpu.strategies import BaguaStrategy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
GIVE_UP = 20  # seconds, after which a rank no longer waits for the other


class Net(L.LightningModule):
    """Calls `during(net, batch_idx)` in each training step, and counts what it does."""

    def __init__(self, during=lambda net, batch_idx: None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.during = during
        self.batches = []
        self.validations = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch_idx)
        self.during(self, batch_idx)
        rank = float(self.trainer.global_rank)
        self.log("rank", rank, on_step=True, on_epoch=True, sync_dist=True)
        return self.layer(batch).square().mean()

    def on_validation_end(self):
        self.validations.append(self.trainer.global_step)

    def validation_step(self, batch, batch_idx):
        self.log("v", batch.mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def asynchronous(folder, **arguments):
    strategy = BaguaStrategy("async", sync_interval_ms=5)
    return trainer(folder, strategy=strategy, devices=2, **arguments)


def slow_rank(folder: str, rank: int) -> bool:
    """Rank 1 makes its third step only after rank 0 has made its last but one.

    Returns whether rank 1 saw that. With an exchange after each batch it cannot.
    """
    signal_file = Path(folder, "rank-0-is-far-ahead")
    found = []

    def during(net, batch_idx):
        if rank == 0 and batch_idx == 8:
            signal_file.touch()
        if rank == 1 and batch_idx == 2:
            deadline = time.monotonic() + GIVE_UP
            while not signal_file.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            found.append(signal_file.exists())

    run = asynchronous(folder, max_epochs=1)
    run.fit(Net(during), DataLoader(Rows(20), 1))
    assert run.global_step == 10
    return rank == 0 or found == [True]


def logged(folder: str) -> dict:
    run = asynchronous(folder, max_epochs=2, log_every_n_steps=1)
    run.fit(Net(), DataLoader(Rows(20), 1), DataLoader(Rows(8), 1))
    return {name: float(value) for name, value in run.callback_metrics.items()}


def uneven(folder: str, rank: int) -> tuple:
    """Streams of 12 and 5 rows per epoch, of which each rank trains on all its own."""
    run = asynchronous(folder, max_epochs=2)
    net = Net()
    run.fit(net, DataLoader(Stream(12 if rank == 0 else 5), 1))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return net.batches, run.current_epoch, metrics


def stopped(folder: str, rank: int) -> tuple:
    """Rank 1, which is slower, wants to stop in batch 10; validations come in between."""

    def during(net, batch_idx):
        time.sleep(0.003 if rank else 0.001)
        if rank == 1 and batch_idx == 10:
            net.trainer.should_stop = True

    run = asynchronous(folder, max_epochs=3, val_check_interval=7)
    net = Net(during)
    run.fit(net, DataLoader(Rows(60), 1), DataLoader(Rows(4), 1))
    return run.current_epoch, run.global_step, net.validations


def stopped_in_validation(folder: str) -> tuple:
    """All ranks want to stop in the validation at the first epoch's end."""
    net = Net()
    net.on_validation_epoch_end = lambda: setattr(net.trainer, "should_stop", True)
    run = asynchronous(folder, max_epochs=5)
    run.fit(net, DataLoader(Rows(20), 1), DataLoader(Rows(4), 1))
    return run.current_epoch, run.global_step


def no_meeting_point(folder: str, data, interval) -> str:
    """The error of a run whose ranks could validate at different steps and so hang."""
    run = asynchronous(folder, max_epochs=1, val_check_interval=interval)
    validation = DataLoader(Rows(4), 1)
    return user_error(lambda: run.fit(Net(), DataLoader(data, 1), validation))


def experiments(folder: str) -> dict:
    rank = launch.find_world().rank
    torch.set_num_threads(1)
    return {
        "slow rank": slow_rank(folder, rank),
        "logged": logged(folder),
        "uneven": uneven(folder, rank),
        "should_stop": stopped(folder, rank),
        "in validation": stopped_in_validation(folder),
        "no length": no_meeting_point(folder, Stream(9 - 4 * rank), 7),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch.call(experiments, 2, str(tmp_path_factory.mktemp("ranks")))


def test_no_rank_waits_for_a_slow_one(ranks):
    assert all(rank["slow rank"] for rank in ranks)


def test_an_epochs_values_are_over_all_ranks_and_a_steps_are_the_ranks_own(ranks):
    for number, rank in enumerate(ranks):
        metrics = rank["logged"]
        assert metrics["rank_epoch"] == 0.5 and metrics["rank_step"] == number
        assert metrics["v"] == 3.5


def test_ranks_of_unequal_length_end_each_epoch_together(ranks):
    for rank, batches in zip(ranks, (12, 5), strict=True):
        assert rank["uneven"][:2] == ([*range(batches)] * 2, 2)
        assert rank["uneven"][2]["rank_epoch"] == pytest.approx(5 / 17)


def test_one_ranks_wish_to_stop_ends_all_with_the_epoch(ranks):
    assert [rank["should_stop"] for rank in ranks] == [(1, 30, [7, 14, 21, 28])] * 2


def test_a_stop_in_the_last_validation_of_an_epoch_ends_with_this_epoch(ranks):
    assert [rank["in validation"] for rank in ranks] == [(1, 10)] * 2


def test_ranks_that_could_validate_at_different_steps_are_refused(ranks):
    for rank in ranks:
        assert "length" in rank["no length"] and "val_check_interval" in rank["no length"]
