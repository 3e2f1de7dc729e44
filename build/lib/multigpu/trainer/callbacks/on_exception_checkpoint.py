"""OnExceptionCheckpoint: save a checkpoint when training fails."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer


class OnExceptionCheckpoint(Callback):
    """Save `dirpath`/`filename`.ckpt before an exception leaves the Trainer.

    The next `fit` without ckpt_path resumes from it, and deletes it at its end. A run on
    several ranks saves nothing, because the other ranks can be in a collective of the step.
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike, filename: str = "on_exception"):
        if not filename:
            raise UserError("OnExceptionCheckpoint(filename=''): give a name.")
        self.dirpath = dirpath
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def last_checkpoints(self, trainer: Trainer) -> set[str]:
        """What ckpt_path="last" can mean."""
        return {self.ckpt_path}

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if trainer.world_size == 1:
            trainer.save_checkpoint(self.ckpt_path)
        else:
            warnings.warn(
                "OnExceptionCheckpoint saves nothing if there are several ranks.", stacklevel=2
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            Path(self.ckpt_path).unlink(missing_ok=True)
