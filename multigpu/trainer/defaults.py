"""Which logger, which callbacks, which profiler, how long? What the Trainer's shorter arguments stand for."""

import importlib.util
from collections.abc import Iterable
from typing import Any

from multigpu.errors import UserError
from multigpu.trainer import loggers
from multigpu.trainer.callbacks import (
    Callback,
    ModelCheckpoint,
    ProgressBar,
    Timer,
    TQDMProgressBar,
)
from multigpu.trainer.hooks import overridden
from multigpu.trainer.loggers.logger import DummyLogger
from multigpu.trainer.profiler import SimpleProfiler


def set_lengths(trainer: Any) -> None:
    """How much is run: fast_dev_run and overfit_batches mean several arguments at once."""
    if trainer.fast_dev_run:
        n = trainer.max_steps = trainer.fast_dev_run
        for kind in ("train", "val", "test", "predict"):
            setattr(trainer, f"limit_{kind}_batches", n)
        trainer.max_epochs, trainer.num_sanity_val_steps, trainer.val_check_interval = (
            1,
            0,
            1.0,
        )
        trainer.check_val_every_n_epoch = 1
    if trainer.overfit_batches:
        trainer.limit_train_batches = trainer.limit_val_batches = trainer.overfit_batches
    if trainer.max_epochs is None:
        trainer.max_epochs = 1000 if trainer.max_steps == -1 else -1


def profiler_for(wanted: Any) -> Any:
    """None, "simple", or a profiler."""
    if wanted in (None, "simple"):
        return SimpleProfiler() if wanted else None
    if isinstance(wanted, str):
        raise UserError(
            f"profiler is {wanted!r}: expected 'simple', a SimpleProfiler, or None."
        )
    return wanted


def loggers_for(trainer: Any, wanted: Any) -> list:
    """None and True mean TensorBoard where it is installed, else a CSV file."""
    if wanted is False:
        return []
    if trainer.fast_dev_run:  # a trial leaves nothing behind
        return [DummyLogger()]
    if wanted in (None, True):
        board = importlib.util.find_spec("tensorboard") is not None
        return [
            (loggers.TensorBoardLogger if board else loggers.CSVLogger)(
                trainer.default_root_dir
            )
        ]
    return list(wanted) if isinstance(wanted, Iterable) else [wanted]


def callbacks_for(
    trainer: Any, given: Any, checkpointing: bool | None, bar: bool | None, max_time: Any
) -> list:
    """The user's, and the usual ones unless they were turned off."""
    found = (
        list(given)
        if isinstance(given, (list, tuple))
        else [given]
        if given is not None
        else []
    )
    own = [cb for cb in found if isinstance(cb, ModelCheckpoint)]
    if own and checkpointing is False:
        raise UserError(
            "enable_checkpointing=False, and callbacks holds a ModelCheckpoint: leave one of them out."
        )
    if checkpointing is not False and not own and not trainer.fast_dev_run:
        found.append(ModelCheckpoint())
    if bar is not False and not any(isinstance(cb, ProgressBar) for cb in found):
        found.append(TQDMProgressBar())
    if max_time is not None:
        found.append(Timer(max_time))
    keys = [cb.state_key for cb in found if overridden("state_dict", cb, Callback)]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(
            f"two callbacks keep their state as {twice!r}, so one would get the other's back: override state_key in one."
        )
    return in_order(found)


def in_order(callbacks: list) -> list:
    """ModelCheckpoints come last: they save what the others have done."""
    return sorted(callbacks, key=lambda cb: isinstance(cb, ModelCheckpoint))
