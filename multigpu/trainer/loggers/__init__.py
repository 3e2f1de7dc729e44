"""The loggers. Import them from here, as from `lightning.pytorch.loggers`."""

from multigpu.trainer.loggers.csv_logger import CSVLogger
from multigpu.trainer.loggers.logger import Logger
from multigpu.trainer.loggers.tensorboard_logger import TensorBoardLogger
from multigpu.trainer.refused import refused_names

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

__getattr__ = refused_names(__name__)
