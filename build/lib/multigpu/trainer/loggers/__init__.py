"""The loggers. Import them from here, as from `lightning.pytorch.loggers`."""

from multigpu.errors import unsupported_names
from multigpu.trainer.loggers.csv_logger import CSVLogger
from multigpu.trainer.loggers.logger import Logger
from multigpu.trainer.loggers.tensorboard_logger import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

# Lightning's other loggers.
UNSUPPORTED = (
    "WandbLogger",
    "MLFlowLogger",
    "CometLogger",
    "NeptuneLogger",
    "LitLogger",
    "TestTubeLogger",
)
INSTEAD = (
    "use CSVLogger or TensorBoardLogger, or write a Logger with log_metrics and "
    "log_hyperparams"
)

__getattr__ = unsupported_names(__name__, dict.fromkeys(UNSUPPORTED, INSTEAD))
