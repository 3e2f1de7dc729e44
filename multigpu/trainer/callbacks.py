"""Which callbacks are there? One place to import them from, as with Lightning."""

from multigpu.trainer.callback import Callback
from multigpu.trainer.early_stopping import EarlyStopping
from multigpu.trainer.lr_monitor import LearningRateMonitor
from multigpu.trainer.model_checkpoint import ModelCheckpoint
from multigpu.trainer.progress import ProgressBar, TQDMProgressBar
from multigpu.trainer.timer import Timer

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ProgressBar",
    "TQDMProgressBar",
    "Timer",
]
