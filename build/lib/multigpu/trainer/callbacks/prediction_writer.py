"""BasePredictionWriter: write predictions while they are made, or after the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Override `write_on_batch_end`, `write_on_epoch_end`, or both.

    Each rank writes its own predictions, so a file's name needs trainer.global_rank. With
    trainer.predict(return_predictions=False) and "batch", no prediction stays in memory.

    write_interval   "batch", "epoch" or "batch_and_epoch": which of the two is called
    """

    def __init__(self, write_interval: str = "batch"):
        if write_interval not in INTERVALS:
            raise UserError(
                f"{type(self).__name__}(write_interval={write_interval!r}): expected one of "
                f"{', '.join(map(repr, INTERVALS))}."
            )
        self.interval = write_interval

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write what predict_step returned for a batch.

        batch_indices   the batch's rows in the data set; None if its dataloader does not know
        """
        raise NotImplementedError

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Write all predictions of this rank.

        predictions     per dataloader, if there are several, a list of one object per batch
        batch_indices   per dataloader a list of the rows of each batch
        """
        raise NotImplementedError

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.interval != "epoch":
            indices = trainer.predict_loop.current_batch_indices
            self.write_on_batch_end(
                trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx
            )

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval != "batch":
            loop = trainer.predict_loop
            self.write_on_epoch_end(
                trainer, pl_module, loop.predictions, loop.epoch_batch_indices
            )
