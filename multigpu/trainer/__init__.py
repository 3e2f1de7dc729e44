"""`import multigpu.trainer as L` in the place of Lightning: the same user code runs.

Read the core in this order:

1. module.py and hooks.py: what the user writes
2. trainer.py: the settings, and what the user calls
3. loops/state.py: what changes while a run goes on
4. loops/run.py: one call of fit, validate, test or predict, from its first to its last line
5. loops/fit.py (epochs), loops/training_step.py (a batch), loops/optimizer_step.py (a step)
6. loops/evaluate.py: validation, testing and prediction
7. loops/results.py, log_context.py and log_rules.py: what `self.log` does
8. What they use: loops/call_hooks.py, dataloaders.py, optimizers.py, precision.py, transfer.py

callbacks/, loggers/, checkpointing/ and profiler.py stand beside the loops, which call them.
"""

import sys

from multigpu import strategies
from multigpu.trainer import callbacks, loggers, utilities
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
    "utilities",
]

pytorch = sys.modules[__name__]  # L.pytorch.callbacks, as in Lightning
# So that `from multigpu.trainer.strategies import DDPStrategy` works.
sys.modules[f"{__name__}.strategies"] = strategies
