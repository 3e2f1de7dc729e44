"""Do our callbacks do what Lightning's do? Lightning's own Trainer drives both, and their files and states are compared.

What needs several ranks, a terminal or a clock is driven by a small stand-in for the Trainer.
"""

import contextlib
import inspect
import io
import math
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from multigpu.errors import UserError
from multigpu.trainer import callbacks as ours
from multigpu.trainer import progress
from multigpu.trainer.early_stopping import EarlyStoppingReason

pytestmark = pytest.mark.filterwarnings("ignore")
NAN = float("nan")


@pytest.fixture(scope="module")
def real():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")
    import logging

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return lightning


def model(real, scores, train_loss=True, optimizer=None):
    """A LightningModule whose n-th validation logs val_loss = scores[n]."""
    left = list(scores)

    class Scored(real.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch[0]).mean()
            if train_loss:
                self.log("train/loss", torch.tensor(0.25 + batch_idx))
            return loss

        def validation_step(self, batch, batch_idx): ...

        def on_validation_epoch_end(self):
            self.log("val_loss", torch.tensor(left.pop(0)))

        def configure_optimizers(self):
            return optimizer(self) if optimizer else torch.optim.SGD(self.parameters(), 0.1)

    return Scored()


def fit(real, root, callback, scores, validate=True, optimizer=None, logger=False, ckpt_path=None, **kwargs):
    """Lightning's Trainer, 4 batches an epoch, with this callback."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)

    class Trainer(real.Trainer):
        _logged_step = property(lambda self: self.fit_loop.epoch_loop._batches_that_stepped)

    if not hasattr(callback, "_legacy_state_key"):  # what checkpoints older than version 1.5 have
        callback._legacy_state_key = None
    is_checkpoint = type(callback).__name__ == "ModelCheckpoint" and not isinstance(callback, ours.ModelCheckpoint)
    given = {"max_epochs": len(scores), "log_every_n_steps": 1, "num_sanity_val_steps": 0, **kwargs}
    trainer = Trainer(
        default_root_dir=root,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        enable_checkpointing=is_checkpoint,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    net = model(real, scores, optimizer=optimizer)
    trainer.fit(net, data, data if validate else None, ckpt_path=ckpt_path)
    return trainer


def told(checkpoint, root):
    """What a ModelCheckpoint knows and what lies on the disk, without the folder's name."""
    short = lambda path: str(path).replace(str(root), "")  # noqa: E731
    return {
        "files": sorted((short(p), p.is_symlink()) for p in root.rglob("*") if p.is_file()),
        "best": short(checkpoint.best_model_path),
        "score": checkpoint.best_model_score,
        "current": checkpoint.current_score,
        "kth": (short(checkpoint.kth_best_model_path), checkpoint.kth_value),
        "top": {short(path): float(score) for path, score in checkpoint.best_k_models.items()},
        "last": short(checkpoint.last_model_path),
        "key": checkpoint.state_key,
        "state": sorted(checkpoint.state_dict()),
    }


DOWN = (0.5, 0.3, 0.4, 0.2)
CHECKPOINTS = {
    "default": ({}, {}),
    "best": ({"monitor": "val_loss"}, {}),
    "best of many": ({"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch:02d}-{val_loss:.2f}"}, {}),
    "max": ({"monitor": "val_loss", "mode": "max", "save_last": True}, {}),
    "all": ({"save_top_k": -1, "filename": "a{step}b"}, {}),
    "all monitored": ({"monitor": "val_loss", "save_top_k": -1}, {}),
    "none": ({"save_top_k": 0}, {}),
    "none but last": ({"save_top_k": 0, "save_last": True}, {}),
    "plain names": ({"filename": "e{epoch}-{val_loss:.1f}", "auto_insert_metric_name": False}, {}),
    "one name": ({"filename": "same", "monitor": "val_loss", "save_top_k": 3}, {}),
    "one name, overwritten": ({"filename": "same", "save_top_k": -1, "enable_version_counter": False}, {}),
    "a slash": ({"filename": "x{train/loss:.2f}", "auto_insert_metric_name": False}, {}),
    "missing in the name": ({"filename": "{nothing}-{epoch}"}, {}),
    "link": ({"save_last": "link", "monitor": "val_loss"}, {}),
    "every two epochs": ({"every_n_epochs": 2, "save_top_k": -1, "save_last": True}, {}),
    "every three steps": ({"every_n_train_steps": 3, "save_top_k": -1}, {}),
    "steps with a metric": ({"every_n_train_steps": 2, "monitor": "val_loss", "save_top_k": 3}, {}),
    "steps, metric at validation": (
        {"every_n_train_steps": 2, "monitor": "val_loss", "save_top_k": -1, "save_on_train_epoch_end": False},
        {},
    ),
    "steps and train loss": ({"every_n_train_steps": 3, "monitor": "train/loss", "filename": "{step}"}, {}),
    "all the time": ({"train_time_interval": timedelta(0), "save_top_k": -1}, {}),
    "after validation": ({"save_on_train_epoch_end": False, "save_top_k": -1}, {}),
    "validation twice an epoch": ({"save_top_k": -1}, {"val_check_interval": 0.5, "max_epochs": 2}),
    "validation every two epochs": ({"save_top_k": -1}, {"check_val_every_n_epoch": 2}),
    "epoch end, validation every two": (
        {"monitor": "val_loss", "save_on_train_epoch_end": True},
        {"check_val_every_n_epoch": 2},
    ),
    "no validation": ({"monitor": "train/loss"}, {"validate": False}),
    "fast_dev_run": ({"save_last": False}, {"fast_dev_run": True}),
    "accumulated": ({"every_n_train_steps": 1, "save_top_k": -1}, {"accumulate_grad_batches": 2}),
    "sanity": ({"monitor": "val_loss"}, {"num_sanity_val_steps": 2, "max_epochs": 3}),
    "weights only": ({"save_weights_only": True}, {}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_same_checkpoints_as_lightnings(real, tmp_path, name):
    arguments, trainer = CHECKPOINTS[name]
    both = []
    for kind, who in (("a", real.pytorch.callbacks.ModelCheckpoint), ("b", ours.ModelCheckpoint)):
        root = tmp_path / kind
        both.append((who(**arguments), root))
        fit(real, root, both[-1][0], DOWN, **trainer)
    (theirs, their_root), (mine, my_root) = both
    assert told(mine, my_root) == told(theirs, their_root)
    assert bool(told(mine, my_root)["files"]) == (name not in ("none", "fast_dev_run"))


def test_nan_is_worse_than_every_number(real, tmp_path):
    for kind, who in (("a", real.pytorch.callbacks.ModelCheckpoint), ("b", ours.ModelCheckpoint)):
        checkpoint = who(monitor="val_loss", dirpath=tmp_path / kind, filename="{epoch}")
        fit(real, tmp_path, checkpoint, (NAN, 0.5, NAN))
        assert told(checkpoint, tmp_path / kind)["best"] == "/epoch=1.ckpt"


def test_a_second_run_in_one_folder_gets_v1_and_a_resumed_one_goes_on(real, tmp_path):
    seen = []
    for kind, who in (("a", real.pytorch.callbacks.ModelCheckpoint), ("b", ours.ModelCheckpoint)):
        make = lambda who=who, kind=kind: who(  # noqa: E731
            dirpath=tmp_path / kind, save_last=True, monitor="val_loss", save_top_k=2
        )
        for _ in range(2):
            fit(real, tmp_path, make(), DOWN[:2])
        resumed = make()
        fit(real, tmp_path, resumed, DOWN[2:], ckpt_path=tmp_path / kind / "last-v1.ckpt", max_epochs=4)
        seen.append(told(resumed, tmp_path / kind))
    assert seen[0] == seen[1] and len(seen[1]["files"]) > 4


def test_checkpoint_states_are_read_by_the_other_one(real, tmp_path):
    theirs = real.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2)
    fit(real, tmp_path, theirs, DOWN)
    mine = ours.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2)
    mine.load_state_dict(theirs.state_dict())
    assert {k: v for k, v in told(mine, tmp_path).items() if k != "current"} == {
        k: v for k, v in told(theirs, tmp_path).items() if k != "current"
    }
    elsewhere = ours.ModelCheckpoint(dirpath=tmp_path / "b", monitor="val_loss")
    with pytest.warns(UserWarning, match="left alone"):
        elsewhere.load_state_dict(theirs.state_dict())
    assert elsewhere.best_model_path == theirs.best_model_path and not elsewhere.best_k_models


def test_saved_on_an_exception(real, tmp_path):
    class Stops(real.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 2:
                raise RuntimeError("power cut")

    seen = []
    for kind, who in (("a", real.pytorch.callbacks.ModelCheckpoint), ("b", ours.ModelCheckpoint)):
        checkpoint = who(dirpath=tmp_path / kind, save_on_exception=True)
        checkpoint.on_train_batch_start = Stops().on_train_batch_start
        with pytest.raises(RuntimeError, match="power cut"):
            fit(real, tmp_path, checkpoint, DOWN)
        seen.append([path.name for path in (tmp_path / kind).iterdir()])
    assert seen[0] == seen[1] == ["epoch=0-step=2.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "trainer"),
    [
        ({"monitor": "val_los"}, {}),
        ({"monitor": "val_los"}, {"val_check_interval": 0.5}),
        ({"monitor": "val_los", "every_n_train_steps": 1}, {}),
        ({"monitor": "val_los"}, {"validate": False}),
    ],
)
def test_a_metric_that_nobody_logs(real, tmp_path, arguments, trainer):
    with pytest.raises(UserError, match=r"no such metric; the metrics are .*train/loss"):
        fit(real, tmp_path, ours.ModelCheckpoint(**arguments), DOWN[:2] * 2, **trainer)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mode": "mni"}, "'min'.*or 'max'"),
        ({"save_top_k": -2}, "-1 for all"),
        ({"save_top_k": 2}, "needs monitor"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "two ModelCheckpoints"),
    ],
)
def test_wrong_arguments_of_a_checkpoint(arguments, says):
    with pytest.raises(UserError, match=says):
        ours.ModelCheckpoint(**arguments)


def test_a_wrong_format_in_a_files_name():
    with pytest.raises(UserError, match=r"\{epoch:zz\} cannot be filled"):
        ours.ModelCheckpoint(filename="{epoch:zz}").format_checkpoint_name({"epoch": torch.tensor(1)})


def test_ranks_whose_metric_differs_keep_the_same_lists(tmp_path):
    """Rank 0's path and score win; without that the lists grow apart, and at last the ranks wait for one another."""
    told, lists = [], []

    def run(rank, metric):
        def broadcast(value, src=0):
            if rank == 0:
                told.append(value)
                return value
            return told.pop(0)

        decisions = SimpleNamespace(broadcast=broadcast, reduce_boolean_decision=lambda d, all=True: d)
        trainer = fake(strategy=decisions, is_global_zero=rank == 0)
        checkpoint = ours.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2)
        checkpoint.setup(trainer, None, "fit")
        for epoch in range(3):
            trainer.current_epoch, trainer.global_step = epoch, epoch + 1
            trainer.callback_metrics = {"val_loss": torch.tensor(metric - epoch)}
            checkpoint.on_validation_end(trainer, None)
            checkpoint.on_train_epoch_end(trainer, None)
        lists.append(checkpoint.best_k_models)

    run(0, 5.0)
    run(1, 4.5)
    assert not told and len(lists[1]) == 2 and lists[0] == lists[1]


def fake(**changes):
    """The few things of a Trainer that callbacks ask for."""
    one = SimpleNamespace(broadcast=lambda value, src=0: value, reduce_boolean_decision=lambda d, all=True: d)
    saved = []
    values = {
        "strategy": one,
        "state": SimpleNamespace(fn="fit"),
        "saved": saved,
        "save_checkpoint": lambda path, weights_only=False: saved.append(path),
        "print": print,
        "is_global_zero": True,
        "sanity_checking": False,
        "fast_dev_run": False,
        "should_stop": False,
        "check_val_every_n_epoch": 1,
        "val_check_interval": 1.0,
        "enable_validation": True,
        "num_val_batches": [1],
        "num_training_batches": 4,
        "max_epochs": 2,
        "current_epoch": 0,
        "global_step": 0,
        "world_size": 1,
        "loggers": [],
        "callback_metrics": {},
        "progress_bar_metrics": {},
    }
    return SimpleNamespace(**values | changes)


STOPS = {
    "patience": ({"patience": 2}, (0.5, 0.4, 0.4, 0.45, 0.1, 0.0), {}),
    "min_delta": ({"patience": 2, "min_delta": 0.1}, (0.5, 0.45, 0.39, 0.35, 0.3, 0.1), {}),
    "max": ({"mode": "max", "patience": 1, "min_delta": 0.05}, (0.5, 0.6, 0.64, 0.9), {}),
    "not finite": ({}, (0.5, math.inf, 0.4), {}),
    "not finite, let through": ({"check_finite": False, "patience": 2}, (0.5, NAN, 0.4, NAN, NAN, 0.1), {}),
    "threshold": ({"stopping_threshold": 0.3}, (0.5, 0.3, 0.2, 0.1), {}),
    "divergence": ({"divergence_threshold": 1.0}, (0.5, 1.0, 1.1, 0.1), {}),
    "never": ({}, (0.5, 0.4, 0.3), {}),
    "after validation": ({"patience": 1}, (0.5, 0.6, 0.6, 0.6), {"val_check_interval": 0.5, "max_epochs": 2}),
    "not strict": ({"monitor": "val_los", "strict": False}, (0.5, 0.4), {}),
    "fast_dev_run": ({"stopping_threshold": 9.0}, (0.5, 0.4), {"fast_dev_run": True}),
    "sanity": ({"patience": 1}, (0.1, 0.5, 0.4, 0.3), {"num_sanity_val_steps": 1, "max_epochs": 3}),
}


@pytest.mark.parametrize("name", STOPS)
def test_stops_where_lightnings_stops(real, tmp_path, name):
    arguments, scores, trainer = STOPS[name]
    seen = []
    for who in (real.pytorch.callbacks.EarlyStopping, ours.EarlyStopping):
        callback = who(**{"monitor": "val_loss", **arguments})
        ended = fit(real, tmp_path, callback, scores, **trainer)
        state = callback.state_dict() | {"best_score": float(callback.best_score)}
        reason = bool(state.pop("stopping_reason_message"))
        seen.append((ended.current_epoch, ended.global_step, callback.state_key, reason, state))
    assert repr(seen[0][:4]) == repr(seen[1][:4])
    assert seen[0][4] == pytest.approx(seen[1][4])
    again = ours.EarlyStopping("val_loss")
    again.load_state_dict(callback.state_dict())
    assert again.state_dict() == callback.state_dict() and again.stopping_reason is callback.stopping_reason


def test_early_stopping_says_what_is_wrong(real, tmp_path):
    with pytest.raises(UserError, match=r"val_los.*did you mean 'val_loss'"):
        fit(real, tmp_path, ours.EarlyStopping("val_los"), DOWN[:1])
    with pytest.raises(UserError, match="'min'"):
        ours.EarlyStopping("x", mode="auto")


def test_one_rank_stops_all(capsys):
    asked = []
    strategy = SimpleNamespace(reduce_boolean_decision=lambda d, all=True: asked.append((d, all)) or True)
    trainer = fake(strategy=strategy, callback_metrics={"a": torch.tensor(1.0)}, world_size=2, global_rank=1)
    stopping = ours.EarlyStopping("a", verbose=True)
    stopping.setup(trainer, None, "fit")
    stopping.on_train_epoch_end(trainer, None)
    assert asked == [(False, False)] and trainer.should_stop
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert capsys.readouterr().out == "[rank: 1] a = 1.000 is the best so far.\n"
    trainer.should_stop, trainer.state.fn = False, "validate"
    stopping.on_train_epoch_end(trainer, None)
    assert not trainer.should_stop


def two_groups(net):
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    net.extra = torch.nn.ParameterList([first, second])
    groups = [{"params": [first]}, {"params": [second], "lr": 0.3, "name": "heads"}]
    optimizer = torch.optim.Adam([*groups, {"params": net.layer.parameters()}], 0.1, weight_decay=0.5)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def by_step(net, name=None):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step", "name": name}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def two_schedulers(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    return [optimizer], [{"scheduler": schedulers[0], "interval": "step"}, schedulers[1]]


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
}


@pytest.mark.parametrize("name", RATES)
def test_the_same_rates_are_logged(real, tmp_path, name):
    optimizer, arguments, trainer = RATES[name]
    seen = []
    for who in (real.pytorch.callbacks.LearningRateMonitor, ours.LearningRateMonitor):
        logged = []

        class Kept(real.pytorch.loggers.logger.DummyLogger):
            def log_metrics(self, metrics, step=None, logged=logged):
                logged.append((step, {name: v for name, v in metrics.items() if "loss" not in name}))

        monitor = who(**arguments)
        ended = fit(real, tmp_path, monitor, DOWN[:2], optimizer=optimizer, logger=Kept(), **trainer)
        known = {k: float(v) for k, v in ended.callback_metrics.items()}
        seen.append((logged, monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values, known))
    assert seen[0] == seen[1]


def test_rates_without_a_logger_or_with_one_name_twice(real, tmp_path):
    with pytest.raises(UserError, match="needs a logger"):
        fit(real, tmp_path, ours.LearningRateMonitor(), DOWN[:1])
    with pytest.raises(UserError, match="'step', 'epoch' or None"):
        ours.LearningRateMonitor("batch")
    groups = [{"params": [torch.ones(1)], "name": "a"}, {"params": [torch.zeros(1)], "name": "a"}]
    trainer = fake(loggers=[1], lr_scheduler_configs=[], optimizers=[torch.optim.SGD(groups, 0.1)])
    with pytest.raises(UserError, match="several parameter groups named a"):
        ours.LearningRateMonitor().on_train_start(trainer, None)


@pytest.mark.parametrize(
    ("duration", "seconds"), [("01:02:03:04", 93784), ({"minutes": 2}, 120), (timedelta(1), 86400)]
)
def test_a_timers_duration(real, duration, seconds):
    theirs = real.pytorch.callbacks.Timer(duration)
    timer = ours.Timer(duration)
    assert timer.time_remaining() == theirs.time_remaining() == seconds
    assert timer.state_dict() == theirs.state_dict() and timer.state_key == theirs.state_key


def test_a_timer_stops_and_counts_the_run_before(real, tmp_path, capsys):
    for interval, steps in (("step", 1), ("epoch", 4)):
        timer = ours.Timer(timedelta(microseconds=1), interval, verbose=False)
        assert fit(real, tmp_path, timer, DOWN).global_step == steps
        assert timer.time_elapsed() > 0 == timer.time_elapsed("test") and timer.end_time() >= timer.start_time()
    timer = ours.Timer({"seconds": 5})
    timer.load_state_dict({"time_elapsed": {"train": 6.0}})
    trainer = fake()
    timer.on_fit_start(trainer, None)
    assert trainer.should_stop and timer.time_remaining() == -1 and "after 0:00:06" in capsys.readouterr().out
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
    theirs = {name: f for name, f in inspect.getmembers(real.Callback, inspect.isfunction) if not name.startswith("_")}
    for name, function in theirs.items():
        mine = inspect.signature(getattr(ours.Callback, name)).parameters
        assert list(mine) == list(inspect.signature(function).parameters), name
    for name in ("ModelCheckpoint", "EarlyStopping", "LearningRateMonitor", "Timer", "TQDMProgressBar"):
        theirs = inspect.signature(getattr(real.pytorch.callbacks, name).__init__).parameters
        mine = inspect.signature(getattr(ours, name).__init__).parameters
        assert [(p.name, p.default) for p in mine.values()] == [(p.name, p.default) for p in theirs.values()]


class Screen(io.StringIO):
    def isatty(self):
        return True


def epoch(bar, trainer, batches=4):
    bar.on_train_epoch_start(trainer, None)
    for i in range(batches):
        trainer.global_step += 1
        bar.on_train_batch_end(trainer, None, None, None, i)
    bar.on_validation_start(trainer, None)
    bar.on_validation_batch_end(trainer, None, None, None, 0)
    bar.on_validation_end(trainer, None)
    bar.on_train_epoch_end(trainer, None)


def test_a_log_gets_one_line_an_epoch(capsys):
    bar, trainer = ours.TQDMProgressBar(), fake(progress_bar_metrics={"loss": torch.tensor(0.123456), "tag": "x"})
    bar.setup(trainer, None, "fit")
    epoch(bar, trainer)
    bar.on_train_end(trainer, None)
    assert capsys.readouterr().out == "epoch 0  step 4  loss 0.1235  tag x\n"
    for silent in (ours.TQDMProgressBar(refresh_rate=0), ours.TQDMProgressBar()):
        silent.setup(fake(is_global_zero=False), None, "fit")
        epoch(silent, trainer)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    bar, trainer = ours.TQDMProgressBar(), fake(progress_bar_metrics={"loss": torch.tensor(0.5)})
    bar.setup(trainer, None, "fit")
    with contextlib.redirect_stdout(screen):
        epoch(bar, trainer)
        bar.print("a", 1, sep="-")
        bar.on_train_end(trainer, None)
    shown = screen.getvalue()
    assert "Epoch 0: 100%" in shown and "4/4" in shown and "loss=0.5" in shown and "Epoch 0, validation" in shown
    assert "a-1\n" in shown and bar._bar is None


@pytest.mark.parametrize(
    ("stage", "word"), [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")]
)
def test_the_other_loops_have_bars_too(stage, word):
    screen, bar = Screen(), ours.TQDMProgressBar()
    trainer = fake(state=SimpleNamespace(fn=stage), num_test_batches=[2, 1], num_predict_batches=[3])
    trainer.num_val_batches = [3]
    name = {"validate": "validation"}.get(stage, stage)
    with contextlib.redirect_stdout(screen):
        getattr(bar, f"on_{name}_start")(trainer, None)
        for i in range(3):
            getattr(bar, f"on_{name}_batch_end")(trainer, None, None, None, i)
        getattr(bar, f"on_{name}_end")(trainer, None)
    assert f"{word}: 100%" in screen.getvalue() and "3/3" in screen.getvalue()


def test_the_bar_is_drawn_ten_times_a_second_at_most(monkeypatch):
    screen, trainer, drawn = Screen(), fake(num_training_batches=1000), []
    bar = ours.TQDMProgressBar(refresh_rate=7)
    monkeypatch.setattr(bar, "get_metrics", lambda trainer, module: drawn.append(bar._done) or {})
    now = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now) * 0.01)
    with contextlib.redirect_stdout(screen):
        bar.on_train_epoch_start(trainer, None)
        for i in range(1000):
            bar.on_train_batch_end(trainer, None, None, None, i)
    assert all(step % 7 == 0 for step in drawn[:-1]) and drawn[-1] == 1000 and 5 < len(drawn) < 25
    endless = fake(num_training_batches=math.inf)
    with contextlib.redirect_stdout(screen):
        bar.on_train_epoch_start(endless, None)
        assert bar._bar.total is None
        bar.on_exception(endless, None, RuntimeError())
    assert bar._bar is None
