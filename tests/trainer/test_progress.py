"""Does a terminal get a bar, and a log one line an epoch? The bar's hooks are called as the Trainer calls them."""

import contextlib
import io
import math
from types import SimpleNamespace

import pytest
import torch
from lightnings import fake

from multigpu.trainer import callbacks as ours
from multigpu.trainer.callbacks import progress


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
    bar, trainer = (
        ours.TQDMProgressBar(),
        fake(progress_bar_metrics={"loss": torch.tensor(0.123456), "tag": "x"}),
    )
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
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    bar, trainer = (
        ours.TQDMProgressBar(),
        fake(progress_bar_metrics={"loss": torch.tensor(0.5)}),
    )
    bar.setup(trainer, None, "fit")
    with contextlib.redirect_stdout(screen):
        epoch(bar, trainer)
        bar.print("a", 1, sep="-")
        bar.on_train_end(trainer, None)
    shown = screen.getvalue()
    assert (
        "Epoch 0: 100%" in shown
        and "4/4" in shown
        and "loss=0.5" in shown
        and "Epoch 0, validation" in shown
    )
    assert "a-1\n" in shown and bar._bar is None


@pytest.mark.parametrize(
    ("stage", "word"),
    [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")],
)
def test_the_other_loops_have_bars_too(stage, word):
    screen, bar = Screen(), ours.TQDMProgressBar()
    trainer = fake(
        state=SimpleNamespace(fn=stage), num_test_batches=[2, 1], num_predict_batches=[3]
    )
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
    monkeypatch.setattr(
        bar, "get_metrics", lambda trainer, module: drawn.append(bar._batches_done) or {}
    )
    now = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now) * 0.01)
    with contextlib.redirect_stdout(screen):
        bar.on_train_epoch_start(trainer, None)
        for i in range(1000):
            bar.on_train_batch_end(trainer, None, None, None, i)
    assert (
        all(step % 7 == 0 for step in drawn[:-1]) and drawn[-1] == 1000 and 5 < len(drawn) < 25
    )
    endless = fake(num_training_batches=math.inf)
    with contextlib.redirect_stdout(screen):
        bar.on_train_epoch_start(endless, None)
        assert bar._bar.total is None
        bar.on_exception(endless, None, RuntimeError())
    assert bar._bar is None
