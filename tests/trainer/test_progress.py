"""The progress bar: a bar on a terminal, one line per epoch in a log.

Its hooks are called as the Trainer calls them.
"""

import contextlib
import io
from itertools import pairwise

import pytest
import torch
from lightnings import fake

from multigpu.trainer.callbacks import TQDMProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_epoch(bar, trainer, batches=4):
    bar.on_train_epoch_start(trainer, None)
    for i in range(batches):
        trainer.global_step += 1
        bar.on_train_batch_end(trainer, None, None, None, i)
    bar.on_train_epoch_end(trainer, None)


def printed_by(bar, text):
    """What bar.print shows on a terminal."""
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        bar.print(text)
    return terminal.getvalue()


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


def test_a_terminal_gets_a_bar():
    terminal = Terminal()
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


@pytest.mark.parametrize(("refresh_rate", "apart"), [(1, 10), (25, 25)])
def test_the_bar_is_drawn_ten_times_a_second_at_most(refresh_rate, apart):
    """The clock goes on by 0.01 s with each batch."""
    batches_done = 0
    drawn_at = []

    class Recorded(TQDMProgressBar):
        def get_metrics(self, trainer, pl_module):
            drawn_at.append(batches_done)
            return {}

    bar = Recorded(refresh_rate)
    trainer = fake(num_training_batches=1000)
    with contextlib.redirect_stdout(Terminal()):
        bar.on_train_epoch_start(trainer, None)
        start = bar._bar.start_t
        bar._bar._time = lambda: start + batches_done * 0.01
        for i in range(1000):
            batches_done = i + 1
            bar.on_train_batch_end(trainer, None, None, None, i)
        bar.on_train_epoch_end(trainer, None)
    *within, last = drawn_at
    assert len(within) > 30 and last == 1000
    assert all(b - a >= apart for a, b in pairwise([0, *within]))


def test_an_endless_epoch_has_a_bar_without_a_total_and_an_exception_closes_it():
    terminal = Terminal()
    bar = TQDMProgressBar()
    trainer = fake(num_training_batches=float("inf"))
    with contextlib.redirect_stdout(terminal):
        run_epoch(bar, trainer)
        bar.on_exception(trainer, None, RuntimeError())
    assert "4it" in terminal.getvalue() and "%" not in terminal.getvalue()
    assert printed_by(bar, "b") == "b\n"
