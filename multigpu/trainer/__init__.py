"""`import multigpu.trainer as L`, in the place of `import lightning as L`: the same user code runs."""

import sys

from multigpu import strategies
from multigpu.trainer import callbacks, loggers
from multigpu.trainer.callbacks import Callback
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.module import LightningModule
from multigpu.trainer.seed import seed_everything
from multigpu.trainer.trainer import Trainer

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "callbacks",
    "loggers",
    "seed_everything",
    "strategies",
]

pytorch = sys.modules[__name__]  # L.pytorch.callbacks…, as in Lightning
