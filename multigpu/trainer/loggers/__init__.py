"""The loggers. Import them from here, as from `lightning.pytorch.loggers`."""

from multigpu.errors import unsupported
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


def __getattr__(name: str) -> type:
    if name in UNSUPPORTED:
        return unsupported(
            name,
            f"multigpu.trainer.loggers does not support Lightning's {name}: use CSVLogger or "
            "TensorBoardLogger, or write a Logger with log_metrics and log_hyperparams.",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
