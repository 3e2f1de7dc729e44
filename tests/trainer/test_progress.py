"""The progress bar: a bar on a terminal, one line per epoch in a log.

Its hooks are called as the Trainer calls them.
"""

import contextlib
import io
from types import SimpleNamespace

import pytest
import torch
from lightnings import fake

from multigpu.trainer.callbacks import TQDMProgressBar, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_epoch(bar, trainer, batches=4):
    bar.on_train_epoch_start(trainer, None)
    for i in range(batches):
        trainer.global_step += 1
        bar.on_train_batch_end(trainer, None, None, None, i)
    bar.on_validation_start(trainer, None)
    bar.on_validation_batch_end(trainer, None, None, None, 0)
    bar.on_validation_end(trainer, None)
    bar.on_train_epoch_end(trainer, None)


def printed_by(bar, text):
    """What bar.print shows on a terminal."""
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        bar.print(text)
    return terminal.getvalue()


# ---- a log ----------------------------------------------------------------------------------


def test_a_log_gets_one_line_per_epoch(capsys):
    bar = TQDMProgressBar()
    trainer = fake(progress_bar_metrics={"loss": torch.tensor(0.123456), "tag": "x"})
    bar.setup(trainer, None, "fit")
    run_epoch(bar, trainer)
    bar.on_train_end(trainer, None)
    assert capsys.readouterr().out == "epoch 0  step 4  loss 0.1235  tag x\n"


def test_a_log_gets_nothing_from_other_ranks_or_at_refresh_rate_0(capsys):
    disabled = TQDMProgressBar(refresh_rate=0)
    disabled.setup(fake(), None, "fit")
    run_epoch(disabled, fake())
    on_rank_1 = TQDMProgressBar()
    on_rank_1.setup(fake(is_global_zero=False), None, "fit")
    run_epoch(on_rank_1, fake(is_global_zero=False))
    assert capsys.readouterr().out == ""


# ---- a terminal -----------------------------------------------------------------------------


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    bar = TQDMProgressBar()
    trainer = fake(progress_bar_metrics={"loss": torch.tensor(0.5)})
    bar.setup(trainer, None, "fit")
    with contextlib.redirect_stdout(terminal):
        run_epoch(bar, trainer)
        bar.print("a", 1, sep="-")
        bar.on_train_end(trainer, None)
    shown = terminal.getvalue()
    for text in ("Epoch 0: 100%", "4/4", "loss=0.5", "a-1\n"):
        assert text in shown
    assert printed_by(bar, "b") == "b\n", "the bar is closed"


@pytest.mark.parametrize(
    ("stage", "description"),
    [("validate", "Validation"), ("test", "Testing"), ("predict", "Predicting")],
)
def test_the_other_loops_have_bars_too(stage, description):
    terminal = Terminal()
    bar = TQDMProgressBar()
    trainer = fake(
        state=SimpleNamespace(
            fn=stage, num_batches={"val": [3], "test": [2, 1], "predict": [3]}
        ),
    )
    hook = {"validate": "validation"}.get(stage, stage)
    with contextlib.redirect_stdout(terminal):
        getattr(bar, f"on_{hook}_start")(trainer, None)
        for i in range(3):
            getattr(bar, f"on_{hook}_batch_end")(trainer, None, None, None, i)
        getattr(bar, f"on_{hook}_end")(trainer, None)
    assert f"{description}: 100%" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_the_bar_is_drawn_ten_times_a_second_at_most(monkeypatch):
    batches_done = 0
    drawn_at = []

    class Recorded(TQDMProgressBar):
        def get_metrics(self, trainer, pl_module):
            drawn_at.append(batches_done)
            return {}

    # A clock that goes on by 0.01 s each time that it is read.
    readings = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(readings) * 0.01)
    bar = Recorded(refresh_rate=7)
    trainer = fake(state=SimpleNamespace(fn="fit", num_batches={"train": 1000}))
    with contextlib.redirect_stdout(Terminal()):
        bar.on_train_epoch_start(trainer, None)
        for i in range(1000):
            batches_done = i + 1
            bar.on_train_batch_end(trainer, None, None, None, i)
    assert all(batch % 7 == 0 for batch in drawn_at[:-1])
    assert drawn_at[-1] == 1000
    assert 5 < len(drawn_at) < 25


# ---- in a run -------------------------------------------------------------------------------
