"""Turns the Trainer's arguments into run lengths, loggers and callbacks."""

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.trainer import loggers
from multigpu.trainer.callbacks import (
    Callback,
    ModelCheckpoint,
    ProgressBar,
    TQDMProgressBar,
)
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loggers.logger import DummyLogger

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

LOG_EVERY_N_STEPS = 50


def run_lengths(trainer: "Trainer") -> dict[str, Any]:
    """The new values of what fast_dev_run and overfit_batches change, by attribute."""
    changed: dict[str, Any] = {}
    if trainer.fast_dev_run:
        batches = int(trainer.fast_dev_run)
        changed["max_epochs"] = 1
        changed["max_steps"] = batches
        for kind in ("train", "val", "test", "predict"):
            changed[f"limit_{kind}_batches"] = batches
        changed["num_sanity_val_steps"] = 0
        changed["val_check_interval"] = 1.0
        changed["check_val_every_n_epoch"] = 1
    if trainer.overfit_batches:
        changed["limit_train_batches"] = trainer.overfit_batches
        changed["limit_val_batches"] = trainer.overfit_batches
    return changed


def limit_epochs(trainer: "Trainer") -> None:
    """Replace max_epochs=None: by no limit if max_steps limits the fit, else by
    1000, with a warning.
    """
    if trainer.max_epochs is not None:
        return
    if trainer.max_steps != -1:
        trainer.max_epochs = -1
        return
    trainer.max_epochs = 1000
    trainer.state.warn_once(
        "max_epochs was not set, so this fit has 1000 epochs: give max_epochs, or -1 for no "
        "limit."
    )


def loggers_for(trainer: "Trainer", logger: Any) -> list[loggers.Logger]:
    """Return the loggers; None and True mean TensorBoard if installed, else a CSV file."""
    if logger is False:
        return []
    if trainer.fast_dev_run:  # a trial run writes no files
        return [DummyLogger()]
    if logger in (None, True):
        has_tensorboard = importlib.util.find_spec("tensorboard") is not None
        default = loggers.TensorBoardLogger if has_tensorboard else loggers.CSVLogger
        return [default(trainer.default_root_dir)]
    return list(logger) if isinstance(logger, Iterable) else [logger]


def callbacks_for(
    trainer: "Trainer",
    given: Any,
    enable_checkpointing: bool | None,
    enable_progress_bar: bool | None,
) -> list[Callback]:
    """Return the user's callbacks, and the default callbacks that are not turned off.

    Raises UserError if arguments contradict each other, or if two callbacks have the same
    state_key.
    """
    if isinstance(given, (list, tuple)):
        callbacks = list(given)
    else:
        callbacks = [] if given is None else [given]
    has_checkpoint = any(isinstance(cb, ModelCheckpoint) for cb in callbacks)
    if has_checkpoint and enable_checkpointing is False:
        raise UserError(
            "enable_checkpointing=False, but callbacks has a ModelCheckpoint: leave one of "
            "them out."
        )
    if enable_checkpointing is not False and not has_checkpoint and not trainer.fast_dev_run:
        callbacks.append(ModelCheckpoint())
    has_bar = any(isinstance(cb, ProgressBar) for cb in callbacks)
    if has_bar and enable_progress_bar is False:
        raise UserError(
            "enable_progress_bar=False, but callbacks has a ProgressBar: leave one of them "
            "out."
        )
    if enable_progress_bar is not False and not has_bar:
        callbacks.append(TQDMProgressBar())
    keys = [cb.state_key for cb in callbacks if is_overridden("state_dict", cb, Callback)]
    if duplicate := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(
            f"two callbacks have the state_key {duplicate!r}, so a checkpoint can keep the "
            f"state of only one of them: override state_key in one."
        )
    return checkpoints_last(callbacks)


def checkpoints_last(callbacks: list[Callback]) -> list[Callback]:
    """Put ModelCheckpoints last, because they save what the other callbacks have changed."""
    return sorted(callbacks, key=lambda cb: isinstance(cb, ModelCheckpoint))
