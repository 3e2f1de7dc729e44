"""The loggers. Import them from here, as from `lightning.pytorch.loggers`."""

from typing import NoReturn

from multigpu.errors import UserError
from multigpu.trainer.loggers.csv_logger import CSVLogger
from multigpu.trainer.loggers.logger import Logger
from multigpu.trainer.loggers.tensorboard_logger import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

# Lightning's other loggers.
UNSUPPORTED = ("WandbLogger", "MLFlowLogger", "CometLogger", "NeptuneLogger", "LitLogger")


def __getattr__(name: str) -> NoReturn:
    if name in UNSUPPORTED:
        raise UserError(
            f"multigpu.trainer.loggers does not support Lightning's {name}: use CSVLogger or "
            "TensorBoardLogger, or write a Logger with log_metrics and log_hyperparams."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
