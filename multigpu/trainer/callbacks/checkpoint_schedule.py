"""When ModelCheckpoint saves: every n epochs, or every n steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multigpu.errors import UserError

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class CheckpointSchedule:
    """Decides when to save, by Lightning's rules. ModelCheckpoint explains the arguments.

    Raises UserError for negative numbers and for both intervals.
    """

    def __init__(
        self,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        save_on_train_epoch_end: bool | None,
    ):
        if every_n_train_steps is every_n_epochs is None:
            every_n_epochs = 1
        self.every_n_train_steps = every_n_train_steps or 0
        self.every_n_epochs = every_n_epochs or 0
        self._save_on_train_epoch_end = save_on_train_epoch_end
        for name in ("every_n_train_steps", "every_n_epochs"):
            if (number := getattr(self, name)) < 0:
                raise UserError(
                    f"ModelCheckpoint({name}={number}): give 1 or more, or 0 for never."
                )
        if self.every_n_train_steps and self.every_n_epochs:
            raise UserError(
                "ModelCheckpoint accepts every_n_train_steps or every_n_epochs: for two "
                "intervals, use two ModelCheckpoints."
            )

    def due_after_batch(self, trainer: Trainer) -> bool:
        """Whether to save after this batch."""
        every = self.every_n_train_steps
        return every > 0 and trainer.global_step % every == 0

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
