"""A Trainer like Lightning's: with `import multigpu.trainer as L`, the same user code runs.

README.md is the map.
"""

import sys

from multigpu.trainer import callbacks, loggers, strategies, utilities
from multigpu.trainer.callbacks import Callback
from multigpu.trainer.checkpoint_io import LIGHTNING_VERSION
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.module import LightningModule
from multigpu.trainer.precision import Precision
from multigpu.trainer.refused import refused_names
from multigpu.trainer.seed import seed_everything
from multigpu.trainer.trainer import Trainer

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Precision",
    "Trainer",
    "callbacks",
    "loggers",
    "seed_everything",
    "strategies",
    "utilities",
]

# Programs print it, or compare it to find out which of Lightning's names there are.
__version__ = LIGHTNING_VERSION
__getattr__ = refused_names(__name__)

pytorch = sys.modules[__name__]  # L.pytorch.callbacks, as in Lightning
