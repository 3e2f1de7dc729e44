"""The callbacks. Import them from here, as from `lightning.pytorch.callbacks`."""

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.early_stopping import EarlyStopping
from multigpu.trainer.callbacks.lr_monitor import LearningRateMonitor
from multigpu.trainer.callbacks.model_checkpoint import ModelCheckpoint
from multigpu.trainer.callbacks.progress import TQDMProgressBar
from multigpu.trainer.refused import refused_names

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "TQDMProgressBar",
]

__getattr__ = refused_names(__name__)
