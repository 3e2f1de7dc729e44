"""`import multigpu.trainer as L`, in the place of `import lightning as L`: the same user code runs.

The core, in the order in which to read it: module.py (what the user writes), trainer.py (what it is given to), stages.py
(a run from its first to its last line), fit.py (epochs), learning.py (a batch), evaluate.py (validation, testing,
prediction), and what they use: optimizers.py, hooking.py, transfer.py, results.py and log_rules.py (what becomes of
`self.log`). Everything else stands beside the loop, and is called by its hooks.
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

pytorch = sys.modules[__name__]  # L.pytorch.callbacks…, as in Lightning
sys.modules[f"{__name__}.strategies"] = (
    strategies  # from multigpu.trainer.strategies import DDPStrategy
)
