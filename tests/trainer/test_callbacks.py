"""Do our callbacks do what Lightning's do? Lightning's own Trainer drives both, and what they know is compared."""

import inspect
import math
from datetime import timedelta
from types import SimpleNamespace

import lightnings
import pytest
import torch
from lightnings import fake, fit

from multigpu.errors import UserError
from multigpu.trainer import callbacks as ours
from multigpu.trainer.callbacks.early_stopping import EarlyStoppingReason

pytestmark = pytest.mark.filterwarnings("ignore")


NAN = float("nan")


DOWN = (0.5, 0.3, 0.4, 0.2)


@pytest.fixture(scope="module")
def real():
    return lightnings.package()


STOPS = {
    "patience": ({"patience": 2}, (0.5, 0.4, 0.4, 0.45, 0.1, 0.0), {}),
    "min_delta": ({"patience": 2, "min_delta": 0.1}, (0.5, 0.45, 0.39, 0.35, 0.3, 0.1), {}),
    "max": ({"mode": "max", "patience": 1, "min_delta": 0.05}, (0.5, 0.6, 0.64, 0.9), {}),
    "not finite": ({}, (0.5, math.inf, 0.4), {}),
    "not finite, let through": (
        {"check_finite": False, "patience": 2},
        (0.5, NAN, 0.4, NAN, NAN, 0.1),
        {},
    ),
    "threshold": ({"stopping_threshold": 0.3}, (0.5, 0.3, 0.2, 0.1), {}),
    "divergence": ({"divergence_threshold": 1.0}, (0.5, 1.0, 1.1, 0.1), {}),
    "never": ({}, (0.5, 0.4, 0.3), {}),
    "after validation": (
        {"patience": 1},
        (0.5, 0.6, 0.6, 0.6),
        {"val_check_interval": 0.5, "max_epochs": 2},
    ),
    "not strict": ({"monitor": "val_los", "strict": False}, (0.5, 0.4), {}),
    "fast_dev_run": ({"stopping_threshold": 9.0}, (0.5, 0.4), {"fast_dev_run": True}),
    "sanity": (
        {"patience": 1},
        (0.1, 0.5, 0.4, 0.3),
        {"num_sanity_val_steps": 1, "max_epochs": 3},
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_stops_where_lightnings_stops(real, tmp_path, name):
    arguments, scores, trainer = STOPS[name]
    seen = []
    for who in (real.pytorch.callbacks.EarlyStopping, ours.EarlyStopping):
        callback = who(**{"monitor": "val_loss", **arguments})
        ended = fit(tmp_path, callback, scores, **trainer)
        state = callback.state_dict() | {"best_score": float(callback.best_score)}
        reason = bool(state.pop("stopping_reason_message"))
        seen.append(
            (ended.current_epoch, ended.global_step, callback.state_key, reason, state)
        )
    assert repr(seen[0][:4]) == repr(seen[1][:4])
    assert seen[0][4] == pytest.approx(seen[1][4])
    again = ours.EarlyStopping("val_loss")
    again.load_state_dict(callback.state_dict())
    assert (
        again.state_dict() == callback.state_dict()
        and again.stopping_reason is callback.stopping_reason
    )


def test_early_stopping_says_what_is_wrong(real, tmp_path):
    with pytest.raises(UserError, match=r"val_los.*did you mean 'val_loss'"):
        fit(tmp_path, ours.EarlyStopping("val_los"), DOWN[:1])
    with pytest.raises(UserError, match="'min'"):
        ours.EarlyStopping("x", mode="auto")


def test_one_rank_stops_all(capsys):
    asked = []
    strategy = SimpleNamespace(
        reduce_boolean_decision=lambda d, all=True: asked.append((d, all)) or True
    )
    trainer = fake(
        strategy=strategy,
        callback_metrics={"a": torch.tensor(1.0)},
        world_size=2,
        global_rank=1,
    )
    stopping = ours.EarlyStopping("a", verbose=True)
    stopping.setup(trainer, None, "fit")
    stopping.on_train_epoch_end(trainer, None)
    assert asked == [(False, False)] and trainer.should_stop
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert capsys.readouterr().out == "[rank: 1] a = 1.000 is the best so far.\n"
    trainer.should_stop, trainer.sanity_checking = False, True
    stopping.on_train_epoch_end(trainer, None)
    trainer.sanity_checking, trainer.state.fn = False, "validate"
    stopping.on_train_epoch_end(trainer, None)
    assert not trainer.should_stop


def two_groups(net):
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    net.extra = torch.nn.ParameterList([first, second])
    groups = [{"params": [first]}, {"params": [second], "lr": 0.3, "name": "heads"}]
    optimizer = torch.optim.Adam(
        [*groups, {"params": net.layer.parameters()}], 0.1, weight_decay=0.5
    )
    return {
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }


def by_step(net, name=None):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scheduler = {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "interval": "step",
        "name": name,
    }
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def two_schedulers(net, name=None):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.lr_scheduler.StepLR(optimizer, 2),
    ]
    return [optimizer], [
        {"scheduler": schedulers[0], "interval": "step", "name": name},
        schedulers[1],
    ]


EVERY = {"log_momentum": True, "log_weight_decay": True}


RATES = {
    "plain": (None, {}, {}),
    "groups": (two_groups, EVERY, {}),
    "step": (by_step, {"log_momentum": True}, {}),
    "step, every other": (by_step, {}, {"log_every_n_steps": 2}),
    "never": (by_step, {}, {"log_every_n_steps": 0}),
    "as steps": (two_groups, {"logging_interval": "step"}, {}),
    "as epochs": (by_step, {"logging_interval": "epoch"}, {}),
    "a name": (lambda net: by_step(net, "rate"), EVERY, {}),
    "two schedulers": (two_schedulers, {}, {}),
    "two schedulers, one named": (lambda net: two_schedulers(net, "rate"), {}, {}),
}


@pytest.mark.parametrize("name", RATES)
def test_the_same_rates_are_logged(real, tmp_path, name):
    optimizer, arguments, trainer = RATES[name]
    seen = []
    for who in (real.pytorch.callbacks.LearningRateMonitor, ours.LearningRateMonitor):
        logged = []

        class Kept(real.pytorch.loggers.logger.DummyLogger):
            def log_metrics(self, metrics, step=None, logged=logged):
                logged.append(
                    (step, {name: v for name, v in metrics.items() if "loss" not in name})
                )

        monitor = who(**arguments)
        ended = fit(tmp_path, monitor, DOWN[:2], optimizer=optimizer, logger=Kept(), **trainer)
        known = {k: float(v) for k, v in ended.callback_metrics.items()}
        seen.append(
            (
                logged,
                monitor.lrs,
                monitor.last_momentum_values,
                monitor.last_weight_decay_values,
                known,
            )
        )
    assert seen[0] == seen[1]


def test_rates_without_a_logger_or_with_one_name_twice(real, tmp_path):
    with pytest.raises(UserError, match="needs a logger"):
        fit(tmp_path, ours.LearningRateMonitor(), DOWN[:1])
    with pytest.raises(UserError, match="'step', 'epoch' or None"):
        ours.LearningRateMonitor("batch")
    groups = [
        {"params": [torch.ones(1)], "name": "a"},
        {"params": [torch.zeros(1)], "name": "a"},
    ]
    trainer = fake(
        loggers=[1], lr_scheduler_configs=[], optimizers=[torch.optim.SGD(groups, 0.1)]
    )
    with pytest.raises(UserError, match="several parameter groups named a"):
        ours.LearningRateMonitor().on_train_start(trainer, None)


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("01:02:03:04", 93784), ({"minutes": 2}, 120), (timedelta(1), 86400)],
)
def test_a_timers_duration(real, duration, seconds):
    theirs = real.pytorch.callbacks.Timer(duration)
    timer = ours.Timer(duration)
    assert timer.time_remaining() == theirs.time_remaining() == seconds
    assert timer.state_dict() == theirs.state_dict() and timer.state_key == theirs.state_key


def test_a_timer_stops_and_counts_the_run_before(real, tmp_path, capsys):
    for interval, steps in (("step", 1), ("epoch", 4)):
        timer = ours.Timer(timedelta(microseconds=1), interval, verbose=False)
        assert fit(tmp_path, timer, DOWN).global_step == steps
        assert (
            timer.time_elapsed() > 0 == timer.time_elapsed("test")
            and timer.end_time() >= timer.start_time()
        )
    timer = ours.Timer({"seconds": 5})
    timer.load_state_dict({"time_elapsed": {"train": 6.0}})
    assert timer.time_elapsed("test") == 0
    timer.on_test_start(None, None)
    timer.on_test_end(None, None)
    timer.on_test_start(None, None)
    assert timer.end_time("test") is None
    trainer = fake()
    timer.on_fit_start(trainer, None)
    assert (
        trainer.should_stop
        and timer.time_remaining() == -1
        and "after 0:00:06" in capsys.readouterr().out
    )
    other = fake(strategy=SimpleNamespace(broadcast=lambda value: False))  # rank 0 says no
    timer.on_train_batch_end(other, None, None, None, 0)
    assert not other.should_stop


@pytest.mark.parametrize("duration", ["1:2", "00:00:00", 3, {"fortnights": 1}])
def test_what_is_no_duration(duration):
    with pytest.raises(UserError, match="Timer"):
        ours.Timer(duration)


def test_other_mistakes_of_a_timer():
    with pytest.raises(UserError, match="'step' or 'epoch'"):
        ours.Timer(interval="batch")
    with pytest.raises(UserError, match="the stages are train"):
        ours.Timer().time_elapsed("training")
    assert ours.Timer().time_remaining() is None


def test_every_hook_is_there_with_lightnings_arguments(real):
    theirs = {
        name: f
        for name, f in inspect.getmembers(real.Callback, inspect.isfunction)
        if not name.startswith("_")
    }
    for name, function in theirs.items():
        mine = inspect.signature(getattr(ours.Callback, name)).parameters
        assert list(mine) == list(inspect.signature(function).parameters), name
    for name in (
        "ModelCheckpoint",
        "EarlyStopping",
        "LearningRateMonitor",
        "Timer",
        "TQDMProgressBar",
    ):
        theirs = inspect.signature(getattr(real.pytorch.callbacks, name).__init__).parameters
        mine = inspect.signature(getattr(ours, name).__init__).parameters
        assert [(p.name, p.default) for p in mine.values()] == [
            (p.name, p.default) for p in theirs.values()
        ]
