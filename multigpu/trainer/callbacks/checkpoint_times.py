"""When is a checkpoint written? After an epoch, every so many steps, or when some time has passed."""

import time
import warnings
from datetime import timedelta
from typing import Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.monitor import missing


class CheckpointTimes(Callback):
    """Calls `_save_top_k` and `_save_last` of the class above it when it is time; the rules are Lightning's."""

    monitor: str | None
    save_last: bool | str | None

    def __init__(
        self,
        every_n_train_steps: int | None,
        train_time_interval: timedelta | None,
        every_n_epochs: int | None,
        save_on_train_epoch_end: bool | None,
        save_on_exception: bool,
    ):
        if (
            every_n_train_steps is None
            and every_n_epochs is None
            and train_time_interval is None
        ):
            every_n_epochs = 1
        steps, epochs = every_n_train_steps or 0, every_n_epochs or 0
        if steps < 0 or epochs < 0:
            what = f"every_n_train_steps={steps}" if steps < 0 else f"every_n_epochs={epochs}"
            raise UserError(f"ModelCheckpoint({what}): give 1 or more, or 0 for never.")
        if bool(steps) + bool(epochs) + (train_time_interval is not None) > 1:
            raise UserError(
                "ModelCheckpoint: give one of every_n_train_steps, every_n_epochs and train_time_interval; "
                "for two rhythms use two ModelCheckpoints."
            )
        self._every_n_train_steps, self._every_n_epochs = steps, epochs
        self._train_time_interval = train_time_interval
        self._save_on_train_epoch_end, self.save_on_exception = (
            save_on_train_epoch_end,
            save_on_exception,
        )
        self._last_global_step_saved = 0  # before the first step there is nothing to save
        self._last_checkpoint_saved = ""
        self._last_time_checked = time.monotonic()
        self._after_validation = False  # a save that waits for the validation's metrics
        self._validated = self._epoch_done = False

    @property
    def every_n_epochs(self) -> int:
        return self._every_n_epochs

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_time_checked, self._validated, self._epoch_done = (
            time.monotonic(),
            False,
            False,
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = (
            self._every_n_train_steps > 0
            and trainer.global_step % self._every_n_train_steps == 0
        )
        if self._train_time_interval is not None:
            passed = (
                time.monotonic() - self._last_time_checked
                >= self._train_time_interval.total_seconds()
            )
            if passed := trainer.strategy.broadcast(passed):  # rank 0's clock decides for all
                self._last_time_checked = time.monotonic()
            due = due or passed
        if not due:
            return
        absent = self.monitor is not None and self.monitor not in trainer.callback_metrics
        if absent and self._epoch_done and self._all_logged(trainer):
            raise missing(self.monitor, trainer.callback_metrics, "ModelCheckpoint")
        last = batch_idx + 1 == trainer.num_training_batches
        if absent or (last and self.monitor is not None and self._validation_follows(trainer)):
            self._after_validation = (
                True  # the metric is not there yet, or is the last validation's
            )
        elif self._may_save(trainer):
            self._save_now(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._epoch_done = True
        if self._may_save(trainer) and self._saves_on_train_epoch_end(trainer):
            self._save_epoch(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validated = self._validated or (
            trainer.state.fn == "fit" and not trainer.sanity_checking
        )
        if not self._may_save(trainer) or self._saves_on_train_epoch_end(trainer):
            return
        if self._after_validation:
            self._after_validation = False
            self._save_now(trainer)
        else:
            self._save_epoch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.save_last and not self._last_checkpoint_saved and not trainer.fast_dev_run:
            self._save_last(trainer, self._metrics(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.save_on_exception and trainer.world_size > 1:
            warnings.warn(
                "save_on_exception saves nothing with several ranks: the others wait elsewhere.",
                stacklevel=2,
            )
        elif self.save_on_exception and self._may_save(trainer):
            metrics = self._metrics(trainer)
            self._save(trainer, self.format_checkpoint_name(metrics))
            self._save_last(trainer, metrics)

    def _may_save(self, trainer: Any) -> bool:
        saved = self._last_global_step_saved == trainer.global_step
        return trainer.state.fn == "fit" and not (
            trainer.sanity_checking or trainer.fast_dev_run or saved
        )

    def _saves_on_train_epoch_end(self, trainer: Any) -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False
        return not _val_batches(trainer) or trainer.val_check_interval == 1.0

    def _validation_follows(self, trainer: Any) -> bool:
        every = trainer.check_val_every_n_epoch
        runs = trainer.enable_validation and _val_batches(trainer) > 0
        now = every is None or (trainer.current_epoch + 1) % every == 0
        return runs and now and not self._saves_on_train_epoch_end(trainer)

    def _all_logged(self, trainer: Any) -> bool:
        return self._validated or not trainer.enable_validation

    def _save_now(self, trainer: Any) -> None:
        metrics = self._metrics(trainer)
        self._save_top_k(trainer, metrics)
        self._save_last(trainer, metrics)

    def _save_epoch(self, trainer: Any) -> None:
        metrics = self._metrics(trainer)
        if self._every_n_epochs and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._save_top_k(trainer, metrics)
        saved = self._last_global_step_saved == trainer.global_step
        if saved or (self.save_last == "link" and self._last_checkpoint_saved):
            self._save_last(trainer, metrics)


def _val_batches(trainer: Any) -> float:
    return (
        sum(trainer.num_val_batches)
        if isinstance(trainer.num_val_batches, list)
        else trainer.num_val_batches
    )
