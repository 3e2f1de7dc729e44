"""Which loggers are there? One place to import them from, as with Lightning."""

from multigpu.trainer.csv_logger import CSVLogger
from multigpu.trainer.logger import Logger
from multigpu.trainer.tensorboard_logger import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
