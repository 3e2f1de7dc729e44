"""Table: the lessons' table of epochs, as a callback of the Trainer."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu import devices, metrics
from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

COLUMNS = ("loss", "test_accuracy")


class Table(Callback):
    """Print the devices of the run and one row per epoch. metrics.report reads `rows`.

    args     the lesson's parsed arguments: epochs, out, resume
    loaded   the checkpoint that the run resumes from, or None

    The module must log "loss" and "test_accuracy" with on_epoch=True. The data module must
    have `train` (the training set), `batch_size` (global) and `images_per_rank`. Raises
    UserError if "loss" or "test_accuracy" is not logged, or if the loss is not finite.
    """

    def __init__(self, args: Namespace, loaded: Path | None = None):
        self.args = args
        self.loaded = loaded
        self.rows: list[dict[str, float]] = []
        self._epoch_start = 0.0
        self._training_seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        world = trainer.strategy.world
        data = trainer.datamodule
        trainer.print(devices.describe(world, trainer.strategy.device))
        trainer.print(
            f"global batch {data.batch_size} = {world.size} (ranks) × "
            f"{data.images_per_rank} (images)\n"
        )
        # A resumed run has its callbacks' states here, but trainer.current_epoch only later.
        progress = {"epoch": len(self.rows), "step": 0, "history": self.rows}
        trainer.print(
            metrics.resume_header(progress, self.args, self.loaded, world), flush=True
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_start = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The validation runs after the epoch's last step. Its time is not training time.
        self._training_seconds = time.perf_counter() - self._epoch_start

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in COLUMNS:
            if name not in trainer.callback_metrics:
                raise UserError(
                    f"the table of epochs needs {name!r}: "
                    f"call self.log({name!r}, …, on_epoch=True) in the module."
                )
        row: dict[str, float] = {"epoch": trainer.current_epoch + 1}
        row |= {name: float(trainer.callback_metrics[name]) for name in COLUMNS}
        metrics.check_loss(row["loss"], trainer.current_epoch, trainer.strategy.world)
        row["images_per_s"] = len(trainer.datamodule.train) / self._training_seconds
        self.rows.append(row)
        trainer.print(metrics.row(row), flush=True)
