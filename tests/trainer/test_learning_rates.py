"""Learning-rate schedulers in a run, and how horovod scales their rates."""

import pytest
import torch
from small_net import Net, cpu, fitted, make_net, rows
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from multigpu import launch


def test_a_plateau_takes_whole_epochs_only():
    model, seen = make_net(), []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau

    def configure_optimizers():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = plateau(optimizer)
        scheduler.step = lambda metric: seen.append(model.current_epoch)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "v"}

    model.configure_optimizers = configure_optimizers
    fitted(model, max_epochs=3, max_steps=10)
    assert seen == [0, 1]


SCHEDULES = {
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.5, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 10)],
        [2],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.LinearLR(o, 0.5, total_iters=2),
            lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.1),
        ]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, mode="max", threshold=1e9, patience=0, min_lr=0.3
    ),
}


class Scheduled(Net):
    def __init__(self, schedule: str):
        super().__init__()
        self.schedule, self.rates = schedule, []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(
            lambda *_: self.rates.append(optimizer.param_groups[0]["lr"])
        )
        reported = {
            "scheduler": SCHEDULES[self.schedule](optimizer),
            "interval": "step",
            "monitor": "l",
        }
        return {"optimizer": optimizer, "lr_scheduler": reported}


def on_two_ranks() -> dict:
    found = {}
    for strategy in ("ddp", "horovod"):
        for schedule in SCHEDULES:
            model = Scheduled(schedule)
            cpu(strategy=strategy).fit(model, DataLoader(rows(16), 1))
            found[schedule, strategy] = model.rates

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": scheduler}
    scheduler = lr_scheduler.ConstantLR(optimizer, 1.0)
    for _ in range(2):
        cpu(strategy="horovod").fit(model, DataLoader(rows(8), 2))
    found["rates"] = [
        optimizer.param_groups[0]["lr"],
        *scheduler.base_lrs,
        type(optimizer).__name__,
    ]
    return found


@pytest.fixture(scope="module")
def two():
    return launch.call(on_two_ranks, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_horovod_scales_a_schedule_as_a_whole(two, schedule):
    one, more = two[0][schedule, "ddp"], two[0][schedule, "horovod"]
    assert len(set(one)) > 1 and len(one) == 8
    assert more == pytest.approx([2 * rate for rate in one])


def test_horovod_scales_an_optimizer_once_that_is_used_twice(two):
    assert two[0]["rates"] == [0.2, 0.2, "SGD"]
