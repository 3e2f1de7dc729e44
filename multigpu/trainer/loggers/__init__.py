"""Which loggers are there? One place to import them from, as with Lightning."""

from typing import NoReturn

from multigpu.errors import UserError
from multigpu.trainer.loggers.csv_logger import CSVLogger
from multigpu.trainer.loggers.logger import Logger
from multigpu.trainer.loggers.tensorboard_logger import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


def __getattr__(name: str) -> NoReturn:
    if name in ("WandbLogger", "MLFlowLogger", "CometLogger", "NeptuneLogger", "LitLogger"):
        raise UserError(
            f"multigpu.trainer.loggers has no {name}, unlike Lightning's: take CSVLogger or TensorBoardLogger, or give a Logger of "
            f"your own with log_metrics and log_hyperparams."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
