"""The callbacks do what Lightning's do: Lightning's Trainer runs both."""

import inspect
import math
import re
from types import SimpleNamespace

import lightnings
import plain_net
import pytest
import small_net
import torch
from lightnings import fake, fit

import multigpu.trainer as L
from multigpu.errors import UserError
from multigpu.trainer import callbacks
from multigpu.trainer.callbacks.early_stopping import STATE
from multigpu.trainer.refused import sentence

pytestmark = pytest.mark.filterwarnings("ignore")
NAN = float("nan")
SCORES = (0.5, 0.3, 0.4, 0.2)


@pytest.fixture(scope="module")
def lightning():
    return lightnings.package()


# name → (EarlyStopping's arguments, val_loss by validation, the Trainer's arguments)
STOPS = {
    "patience": ({"patience": 2}, (0.5, 0.4, 0.4, 0.45, 0.1, 0.0), {}),
    "min_delta": ({"patience": 2, "min_delta": 0.1}, (0.5, 0.45, 0.39, 0.35, 0.3, 0.1), {}),
    "not finite": ({}, (0.5, math.inf, 0.4), {}),
    "after validation": (
        {"patience": 1},
        (0.5, 0.6, 0.6, 0.6),
        {"val_check_interval": 0.5, "max_epochs": 2},
    ),
    "fast_dev_run": ({"patience": 0}, (0.5, 0.4), {"fast_dev_run": True}),
    "sanity": (
        {"patience": 1},
        (0.1, 0.5, 0.4, 0.3),
        {"num_sanity_val_steps": 1, "max_epochs": 3},
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_stops_where_lightnings_stops(lightning, tmp_path, name):
    arguments, scores, trainer_arguments = STOPS[name]
    ends, states = [], []
    for cls in (lightning.pytorch.callbacks.EarlyStopping, callbacks.EarlyStopping):
        callback = cls(**{"monitor": "val_loss", **arguments})
        trainer = fit(tmp_path, callback, scores, **trainer_arguments)
        state = callback.state_dict() | {"best_score": float(callback.best_score)}
        ends.append((trainer.current_epoch, trainer.global_step, callback.state_key))
        states.append({name: state[name] for name in STATE})
    assert ends[0] == ends[1]
    assert states[0] == pytest.approx(states[1])
    restored = callbacks.EarlyStopping("val_loss")
    restored.load_state_dict(callback.state_dict())
    assert restored.state_dict() == callback.state_dict()


def test_mistakes_with_early_stopping(lightning, tmp_path):
    with pytest.raises(UserError, match=r"val_los.*did you mean 'val_loss'"):
        fit(tmp_path, callbacks.EarlyStopping("val_los"), SCORES[:1])
    with pytest.raises(UserError, match=r"EarlyStopping.*'auto'.*'min'.*'max'"):
        callbacks.EarlyStopping("x", mode="auto")


def two_groups(net):
    first = torch.nn.Parameter(torch.ones(1))
    second = torch.nn.Parameter(torch.ones(1))
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


# name → (the module's optimizers, LearningRateMonitor's arguments, the Trainer's arguments)
RATES = {
    "plain": (None, {}, {}),
    "groups": (two_groups, {}, {}),
    "step": (by_step, {}, {}),
    "as steps": (two_groups, {"logging_interval": "step"}, {}),
    "two schedulers": (two_schedulers, {}, {}),
}


@pytest.mark.parametrize("name", RATES)
def test_the_same_rates_are_logged(lightning, tmp_path, name):
    optimizer, arguments, trainer_arguments = RATES[name]

    class Recorder(lightning.pytorch.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.logged = []

        def log_metrics(self, metrics, step=None):
            rates = {name: value for name, value in metrics.items() if "loss" not in name}
            self.logged.append((step, rates))

    results = []
    for cls in (
        lightning.pytorch.callbacks.LearningRateMonitor,
        callbacks.LearningRateMonitor,
    ):
        monitor = cls(**arguments)
        logger = Recorder()
        trainer = fit(
            tmp_path,
            monitor,
            SCORES[:2],
            optimizer=optimizer,
            logger=logger,
            **trainer_arguments,
        )
        results.append(
            {
                "logged": logger.logged,
                "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
            }
        )
    assert results[0] == results[1]


def test_mistakes_with_the_learning_rate_monitor(lightning, tmp_path):
    with pytest.raises(UserError, match=r"needs a logger.*logger=False"):
        fit(tmp_path, callbacks.LearningRateMonitor(), SCORES[:1])
    with pytest.raises(UserError, match=r"'batch'.*'step', 'epoch' or None"):
        callbacks.LearningRateMonitor("batch")


def test_every_hook_has_lightnings_arguments(lightning):
    for name, function in inspect.getmembers(lightning.Callback, inspect.isfunction):
        if not name.startswith("_"):
            hook = getattr(callbacks.Callback, name)
            expected = list(inspect.signature(function).parameters)
            assert list(inspect.signature(hook).parameters) == expected, name


@pytest.mark.parametrize(
    "name",
    [
        "ModelCheckpoint",
        "EarlyStopping",
        "LearningRateMonitor",
        "TQDMProgressBar",
    ],
)
def test_every_callback_has_lightnings_arguments(lightning, name):
    """Those that are here have its order and defaults; the others are refused."""

    def arguments(cls):
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {
            each.name: each.default for each in parameters if each.kind != each.VAR_KEYWORD
        }

    theirs = arguments(getattr(lightning.pytorch.callbacks, name))
    this = arguments(getattr(callbacks, name))
    missing = theirs.keys() - this.keys()
    given = {"monitor": "x"} if "monitor" in this else {}
    assert list(this.items()) == [pair for pair in theirs.items() if pair[0] not in missing]
    for argument in missing:
        with pytest.raises(UserError, match=re.escape(sentence(argument, name))):
            getattr(callbacks, name)(**{argument: True, **given})


def test_two_callbacks_of_one_key_are_refused():
    class Counts(L.Callback):
        def state_dict(self):
            return {"n": 1}

    with pytest.raises(UserError, match=r"two callbacks.*Counts'.* override state_key"):
        plain_net.trainer(callbacks=[Counts(), Counts()])


def test_a_callback_that_comes_late_is_called():
    class Late(L.Callback):
        batches = 0

        def on_train_batch_end(self, *_):
            self.batches += 1

    class First(L.Callback):
        def on_train_start(self, trainer, module):
            trainer.callbacks.append(late)

    late = Late()
    small_net.fitted(small_net.make_net(), callbacks=[First()])
    assert late.batches == 4


def test_checkpoints_come_last(tmp_path):
    mine = [L.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=n) for n in (1, 2)]
    given = [*mine, L.callbacks.EarlyStopping("l")]
    trainer = small_net.cpu(callbacks=given, enable_checkpointing=True)
    assert trainer.callbacks[-2:] == mine


def test_one_rank_stops_all():
    trainer = fake(
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: not all),
        callback_metrics={"a": torch.tensor(1.0)},
    )
    stopping = callbacks.EarlyStopping("a")
    stopping.setup(trainer, None, "fit")
    stopping.on_train_epoch_end(trainer, None)
    assert trainer.should_stop
