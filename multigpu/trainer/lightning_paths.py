"""Lightning's import paths: `from lightning.pytorch.core import …` works with this library.

`register` puts a module for each path of TABLE and OLD into sys.modules. Its names are those
of the module that has them here. Where a real module has the path, it gets the names that it
lacks. Paths that are the same here, such as …trainer.callbacks, need no entry.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from multigpu.errors import unsupported
from multigpu.strategies.registry import ALTERNATIVES
from multigpu.trainer import callbacks

COMMAND_LINE = "write the program with argparse or typer"
METRICS = "install torchmetrics, and import it"
PRECISION = "give Trainer(precision=…), and strategy='ddp' or a DDPStrategy"
LOGGERS = "use CSVLogger or TensorBoardLogger, or write a Logger"
# Path below lightning.pytorch → the module here (below multigpu.trainer, unless it begins with
# multigpu), and its names. {}: callbacks.ALTERNATIVES has the sentence about its callback.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerators": {
        "multigpu.strategies.accelerators": (
            "Accelerator",
            "CPUAccelerator",
            "CUDAAccelerator",
        ),
    },
    "callbacks.gradient_accumulation_scheduler": {
        "callbacks.accumulation": ("GradientAccumulationScheduler",),
    },
    "callbacks.device_stats_monitor": {},
    "callbacks.progress": {"callbacks.rich_progress": ("RichProgressBar",)},
    "callbacks.progress.progress_bar": {"callbacks.progress": ("ProgressBar",)},
    "callbacks.progress.rich_progress": {"callbacks.rich_progress": ("RichProgressBar",)},
    "callbacks.progress.tqdm_progress": {"callbacks.progress": ("TQDMProgressBar",)},
    "callbacks.lambda_function": {"callbacks.lambda_callback": ("LambdaCallback",)},
    "callbacks.rich_model_summary": {},
    "callbacks.stochastic_weight_avg": {},
    "core": {
        "datamodule": ("LightningDataModule",),
        "module": ("LightningModule",),
    },
    "core.datamodule": {"datamodule": ("LightningDataModule",)},
    "core.mixins": {"checkpointing.hyperparameters": ("HyperparametersMixin",)},
    "core.module": {"module": ("LightningModule",)},
    "core.optimizer": {"loops.optimizer_step": ("LightningOptimizer",)},
    "loggers.csv_logs": {"loggers.csv_logger": ("CSVLogger",)},
    "loggers.tensorboard": {"loggers.tensorboard_logger": ("TensorBoardLogger",)},
    "profilers": {
        "profiler": ("PassThroughProfiler", "Profiler", "SimpleProfiler"),
        "torch_profiler": ("PyTorchProfiler",),
    },
    "profilers.profiler": {"profiler": ("Profiler",)},
    "profilers.pytorch": {"torch_profiler": ("PyTorchProfiler",)},
    "profilers.simple": {"profiler": ("SimpleProfiler",)},
    "strategies.single_device": {"multigpu.strategies.single": ("SingleDeviceStrategy",)},
    "strategies.strategy": {"multigpu.strategies.base": ("Strategy",)},
    "trainer.states": {"states": ("RunningStage", "TrainerFn", "TrainerStatus")},
    "trainer.trainer": {"trainer": ("Trainer",)},
    "utilities.exceptions": {"utilities": ("MisconfigurationException",)},
    "utilities.combined_loader": {"combined_loader": ("CombinedLoader",)},
    "utilities.grads": {"utilities": ("grad_norm",)},
    "utilities.model_summary": {"summary": ("summarize",)},
    "utilities.parsing": {"checkpointing.attribute_dict": ("AttributeDict",)},
    "utilities.rank_zero": {
        "utilities": ("rank_zero_info", "rank_zero_only", "rank_zero_warn")
    },
    "utilities.seed": {"utilities": ("isolate_rng",)},
    "utilities.types": {
        "utilities": (
            "EVAL_DATALOADERS",
            "OptimizerLRScheduler",
            "STEP_OUTPUT",
            "TRAIN_DATALOADERS",
        ),
        "loops.optimizers": ("LRSchedulerConfig",),
    },
}
# Paths of Lightning 1.x, which Lightning 2 has no longer.
OLD: dict[str, dict[str, tuple[str, ...]]] = {
    "callbacks.base": {"callbacks.callback": ("Callback",)},
    "core.lightning": {"module": ("LightningModule",)},
    "profiler": {"torch_profiler": ("PyTorchProfiler",)},
    "strategies.ddp_spawn": {"multigpu.strategies.spawn": ("DDPSpawnStrategy",)},
    "trainer.supporters": {"combined_loader": ("CombinedLoader",)},
    "utilities.distributed": {
        "utilities": ("rank_zero_info", "rank_zero_only", "rank_zero_warn")
    },
    "utilities.seed": {"seed": ("seed_everything",)},
}
# Path → what does the same here. Each name that is imported from it is a
# class that raises this sentence when it is called.
UNSUPPORTED = {
    "cli": COMMAND_LINE,
    "utilities.cli": COMMAND_LINE,
    "metrics": METRICS,
    "metrics.functional": METRICS,
    "plugins": PRECISION,
    "plugins.environments": "torchrun, srun, mpirun and multigpu horovodrun need no plugin",
    "plugins.precision": PRECISION,
    "plugins.training_type": PRECISION,
    "loggers.wandb": LOGGERS,
    "loggers.mlflow": LOGGERS,
    "loggers.comet": LOGGERS,
    "loggers.neptune": LOGGERS,
    "strategies.deepspeed": ALTERNATIVES["deepspeed"],
    "strategies.fsdp": ALTERNATIVES["fsdp"],
    "tuner": "compare several learning rates or batch sizes yourself",
    "utilities.deepspeed": "give strategy='ddp'",
}


def register(package: str) -> None:
    """Make the paths importable below `package`."""
    for path, sources in (*TABLE.items(), *OLD.items()):
        new = ModuleType(f"{package}.{path}", f"Lightning's path for {', '.join(sources)}.")
        module = _add(new)
        for source, names in sources.items():
            below = "" if source.startswith("multigpu.") else f"{package}."
            owner = importlib.import_module(f"{below}{source}")
            for name in names:
                vars(module).setdefault(name, getattr(owner, name))
        if path.startswith("callbacks."):  # its sentences for what is not supported
            vars(module).setdefault("__getattr__", callbacks.__getattr__)
    for path, advice in UNSUPPORTED.items():
        module = ModuleType(f"{package}.{path}")
        module.__getattr__ = _refuse(path, advice)
        _add(module)


def _add(module: ModuleType) -> ModuleType:
    """Register the module, also as an attribute of its parent; return the module that has the
    name, which can be a real one.
    """
    module.__path__ = []
    module = sys.modules.setdefault(module.__name__, module)
    parent, _, name = module.__name__.rpartition(".")
    vars(sys.modules[parent]).setdefault(name, module)
    return module


def _refuse(path: str, advice: str) -> Any:
    def getattr_(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unsupported(
            name, f"multigpu.trainer does not support {name} of Lightning's {path}: {advice}."
        )

    return getattr_
