"""When ModelCheckpoint saves: every n epochs, every n steps, or after a time interval."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from multigpu.errors import UserError

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class CheckpointSchedule:
    """Decides when to save, by Lightning's rules. ModelCheckpoint explains the arguments.

    Raises UserError for negative numbers and for more than one of the three intervals.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        train_time_interval: timedelta | None,
        every_n_epochs: int | None,
        save_on_train_epoch_end: bool | None,
    ):
        if every_n_train_steps is every_n_epochs is train_time_interval is None:
            every_n_epochs = 1
        self.every_n_train_steps = every_n_train_steps or 0
        self.every_n_epochs = every_n_epochs or 0
        self.train_time_interval = train_time_interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._last_time_checked = float("inf")  # until start_clock
        for name in ("every_n_train_steps", "every_n_epochs"):
            if (number := getattr(self, name)) < 0:
                raise UserError(
                    f"ModelCheckpoint({name}={number}): give 1 or more, or 0 for never."
                )
        intervals = (self.every_n_train_steps, self.every_n_epochs)
        if sum(map(bool, intervals)) + (train_time_interval is not None) > 1:
            raise UserError(
                "ModelCheckpoint accepts only one of every_n_train_steps, every_n_epochs and "
                "train_time_interval: for two intervals, use two ModelCheckpoints."
            )

    def start_clock(self) -> None:
        """Measure `train_time_interval` from now on. Called when training starts."""
        self._last_time_checked = time.monotonic()

    def due_after_batch(self, trainer: Trainer) -> bool:
        """Whether to save after this batch. All ranks call it."""
        every = self.every_n_train_steps
        due = every > 0 and trainer.global_step % every == 0
        if self.train_time_interval is None:
            return due
        now = time.monotonic()
        seconds = now - self._last_time_checked
        # Rank 0 decides, because clocks differ but all ranks must save together.
        passed = trainer.strategy.broadcast(
            seconds >= self.train_time_interval.total_seconds()
        )
        if passed:
            self._last_time_checked = now
        return due or passed

    def due_after_epoch(self, trainer: Trainer) -> bool:
        """Whether to save after this epoch."""
        every = self.every_n_epochs
        return every > 0 and (trainer.current_epoch + 1) % every == 0

    def saves_on_train_epoch_end(self, trainer: Trainer) -> bool:
        """Whether to save at the end of the training epoch instead of after the validation."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False
        return not _num_val_batches(trainer) or trainer.val_check_interval == 1.0

    def waits_for_validation(self, trainer: Trainer) -> bool:
        """Whether this epoch ends with a validation and its checkpoint is saved after that."""
        every = trainer.check_val_every_n_epoch
        validates = trainer.enable_validation and _num_val_batches(trainer) > 0
        this_epoch = every is None or (trainer.current_epoch + 1) % every == 0
        return validates and this_epoch and not self.saves_on_train_epoch_end(trainer)


def _num_val_batches(trainer: Trainer) -> float:
    batches = trainer.num_val_batches
    return sum(batches) if isinstance(batches, list) else batches
