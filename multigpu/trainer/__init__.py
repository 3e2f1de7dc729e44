"""A Trainer like Lightning's: with `import multigpu.trainer as L`, the same user code runs.

Read the core in this order:

1. module.py and hooks.py: what the user writes
2. trainer.py: the settings, and what the user calls
3. loops/state.py: the state that changes during a run
4. loops/run.py: one call of fit, validate, test or predict, from start to end
5. loops/fit.py (epochs), training_step.py (one batch), optimizer_step.py (one optimizer step)
6. loops/evaluate.py: validation, testing and prediction
7. loops/results.py, log_context.py and log_rules.py: what `self.log` does
8. loops/call_hooks.py, dataloaders.py, optimizers.py, precision.py, transfer.py: helpers

The loops also call callbacks/, loggers/ and checkpointing/.
"""

import sys

from multigpu.trainer import callbacks, loggers, strategies, utilities
from multigpu.trainer.callbacks import Callback
from multigpu.trainer.checkpointing.contents import LIGHTNING_VERSION
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.module import LightningModule
from multigpu.trainer.refused import refused_names
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

# Programs print it, or compare it to find out which of Lightning's names there are.
__version__ = LIGHTNING_VERSION
__getattr__ = refused_names(__name__)

pytorch = sys.modules[__name__]  # L.pytorch.callbacks, as in Lightning
