"""The Trainer: it holds the settings, starts the ranks, and runs what the user wrote."""

import importlib.util
from collections.abc import Iterable
from dataclasses import fields
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn

from multigpu.errors import UserError, report_user_errors
from multigpu.strategies import Strategy
from multigpu.trainer import arguments, checkpoint_io, checkpoints, spawned
from multigpu.trainer.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    TQDMProgressBar,
)
from multigpu.trainer.check_model import check_model
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loggers import CSVLogger, Logger, TensorBoardLogger
from multigpu.trainer.loggers.logger import DummyLogger
from multigpu.trainer.module import LightningModule
from multigpu.trainer.refused import refused_method
from multigpu.trainer.run import Run, StepModule, Task
from multigpu.trainer.settings import Settings
from multigpu.trainer.start import run_stage
from multigpu.trainer.state import State


class Trainer(Settings):
    """Lightning's Trainer, plus the strategies that Lightning has removed: dp, ddp2, horovod,
    bagua.

    The arguments mean the same as in Lightning, with one difference:

    num_nodes   None: as many nodes as the launcher has started

    `settings` are the arguments that the loops read, such as max_epochs: see settings.py. They
    are attributes of the same names. What changes during a run is in `trainer.state`; the
    properties below read it under Lightning's names.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: Any = "auto",
        num_nodes: int | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        **settings: Any,
    ):
        report_user_errors()
        known = {field.name for field in fields(Settings)}
        old = {name: settings.pop(name) for name in [*settings] if name not in known}
        translated = arguments.translate_old_names(
            old, accelerator, strategy, devices, known | {*signature(Trainer).parameters}
        )
        self.strategy, self.accelerator = arguments.choose(
            translated.pop("strategy", strategy),
            translated.pop("accelerator", accelerator),
            translated.pop("devices", devices),
            translated.pop("num_nodes", num_nodes),
        )
        super().__init__(**settings | translated)
        self.loggers = self._loggers(logger)
        checkpoints_wanted = enable_checkpointing is not False and not self.fast_dev_run
        defaults: list[type[Callback]] = [ModelCheckpoint] if checkpoints_wanted else []
        if enable_progress_bar is not False:
            defaults.append(TQDMProgressBar)
        self.callbacks = self._callbacks(callbacks, defaults)
        self.state = State()
        self.run: Run | None = None  # the last run in this process
        self.lightning_module: LightningModule | None = None
        # The content of a checkpoint of spawned ranks: this process cannot compose it.
        self.spawned_checkpoint: dict[str, Any] | None = None

    def _loggers(self, logger: Any) -> list[Logger]:
        """The loggers; None and True mean TensorBoard if installed, else a CSV file."""
        if logger is False:
            return []
        if self.fast_dev_run:  # a trial run writes no files
            return [DummyLogger()]
        if logger in (None, True):
            has_tensorboard = importlib.util.find_spec("tensorboard") is not None
            default = TensorBoardLogger if has_tensorboard else CSVLogger
            return [default(self.default_root_dir)]
        return list(logger) if isinstance(logger, Iterable) else [logger]

    def _callbacks(self, callbacks: Any, defaults: list[type[Callback]]) -> list[Callback]:
        """The user's callbacks, and one of each default kind of which there is none.

        Raises UserError if two callbacks have the same state_key.
        """
        if callbacks is None:
            callbacks = []
        callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        for kind in defaults:
            if not any(isinstance(callback, kind) for callback in callbacks):
                callbacks.append(kind())
        stateful = [cb for cb in callbacks if is_overridden("state_dict", cb, Callback)]
        keys = [callback.state_key for callback in stateful]
        if duplicate := next((key for key in keys if keys.count(key) > 1), None):
            raise UserError(
                f"two callbacks have the state_key {duplicate!r}, so a checkpoint can keep "
                f"the state of only one of them: override state_key in one."
            )
        # Those that save come last, because they save what the others have changed.
        return sorted(callbacks, key=lambda callback: callback.saves)

    # ---- what the user calls ----------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train. With `ckpt_path` ("best", "last" or a file), resume as if the run had never
        stopped.

        One exception: some of bagua's algorithms keep different weights on each rank. Their
        checkpoints hold only rank 0's weights, and all ranks resume from these.

        weights_only=False reads any object, which can run code from the file: use it only for
        files that you trust.
        """
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        self._run(Task("fit", model, datamodule, loaders, ckpt_path, weights_only))

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Return a list of metrics: one dict per dataloader. Every sample counts once."""
        loaders = {"val": dataloaders}
        task = Task("validate", model, datamodule, loaders, ckpt_path, weights_only)
        return self._evaluate(task, verbose)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Like `validate`, but with `test_step`."""
        loaders = {"test": dataloaders}
        task = Task("test", model, datamodule, loaders, ckpt_path, weights_only)
        return self._evaluate(task, verbose)

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list | None:
        """Return `predict_step`'s outputs for all batches, in order, on every rank.

        return_predictions   False: do not keep the outputs, and return None
        """
        loaders = {"predict": dataloaders}
        task = Task("predict", model, datamodule, loaders, ckpt_path, weights_only)
        task.keeps_outputs = return_predictions is not False
        return self._run(task)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None) -> None:
        """Write a checkpoint. All ranks must call it; rank 0 writes."""
        if self.lightning_module is None:
            raise UserError(
                "trainer.save_checkpoint was called before any training: "
                "call fit first, or save the weights with torch.save."
            )
        content = self.spawned_checkpoint or checkpoints.compose(self.run)
        checkpoint_io.write(self.strategy, content, filepath, bool(weights_only))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, without disturbing the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback
            print_function = bar.print if bar else print
            print_function(*args, **kwargs)

    def report(self, text: str) -> None:
        """Print a line about the run's progress, if there is a progress bar."""
        if self.progress_bar_callback is not None:
            self.print(text)

    def _run(self, task: Task) -> Any:
        """Check the arguments, and let the strategy run the task in all processes."""
        if task.module is None:
            task.module = self.lightning_module
            saver = self.checkpoint_callback
            # Without a model, use the best checkpoint of the last fit, as Lightning does.
            if task.ckpt_path is None and saver is not None and saver.best_model_path:
                task.ckpt_path = "best"
                self.state.warn_once(
                    f"trainer.{task.stage} without a model uses the weights of "
                    f"{saver.best_model_path}: to say so, give ckpt_path='best'."
                )
        for name, loader in task.loaders.items():
            # A data module can be given in place of the dataloader: fit(model, datamodule).
            if hasattr(loader, "train_dataloader") and not isinstance(loader, nn.Module):
                task.datamodule = loader
                task.loaders[name] = None
        contradicting = [name for name, loader in task.loaders.items() if loader is not None]
        if task.datamodule is not None and contradicting:
            raise UserError(
                f"trainer.{task.stage} was given a data module and {contradicting[0]} "
                f"dataloaders: give one of them only."
            )
        check_model(task.stage, task.module)
        if getattr(self.strategy, "trains_in_other_processes", False):
            return spawned.run_in_processes(self, _run_on_rank, task)
        return self.strategy.launch(_run_on_rank, self, task)

    def _evaluate(self, task: Task, verbose: bool) -> list[dict[str, float]]:
        """Run the task; return its metrics, and print them if `verbose`."""
        of_dataloaders = self._run(task)
        for number, metrics in enumerate(of_dataloaders if verbose else ()):
            if metrics:
                prefix = f"dataloader {number}: " if len(of_dataloaders) > 1 else ""
                values = (f"{name} {float(value):.4f}" for name, value in metrics.items())
                self.print(prefix + ", ".join(values))
        return of_dataloaders

    def remember(
        self, model: LightningModule, spawned_checkpoint: dict[str, Any] | None = None
    ) -> None:
        """Keep the module for a later call without one, and what spawned ranks can save."""
        self.lightning_module = model
        self.spawned_checkpoint = spawned_checkpoint
        model.trainer = self

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to begin a run: arguments, callbacks, counters."""
        return {
            **vars(self),
            "run": None,
            "lightning_module": None,
            "spawned_checkpoint": None,
        }

    add_argparse_args = staticmethod(refused_method("add_argparse_args"))
    from_argparse_args = staticmethod(refused_method("from_argparse_args"))
    init_module = refused_method("init_module")
    tune = refused_method("tune")

    # ---- the run: Lightning's names ---------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """True ends training after this batch, but not before min_epochs and min_steps."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        self.state.should_stop = should_stop

    optimizers = property(lambda self: self.run.optimizers if self.run else [])
    lr_scheduler_configs = property(lambda self: self.run.schedulers if self.run else [])
    # Completed epochs; during an epoch, this epoch's index from 0.
    current_epoch = property(attrgetter("state.current_epoch"))
    global_step = property(attrgetter("state.global_step"))  # optimizer steps
    # The number of batches that ended with an optimizer step: the loggers' x axis.
    _logged_step = property(attrgetter("state.batches_that_stepped"))
    # Logged values by name. It is the same dict during a run: callbacks can add values.
    callback_metrics = property(attrgetter("state.metrics.callback"))
    logged_metrics = property(attrgetter("state.metrics.logged"))
    ckpt_path = property(attrgetter("state.ckpt_path"))  # that the last run loaded, or None
    global_rank = property(attrgetter("strategy.world.rank"))
    local_rank = property(attrgetter("strategy.world.local_rank"))
    world_size = property(attrgetter("strategy.world.size"))
    num_nodes = property(attrgetter("strategy.nodes"))
    is_global_zero = property(attrgetter("strategy.is_global_zero"))

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        metrics = self.state.metrics.progress_bar
        return {name: float(value) for name, value in metrics.items()}

    training = property(lambda self: self.state.stage == "train")
    sanity_checking = property(lambda self: self.state.stage == "sanity_check")
    validating = property(lambda self: self.state.stage == "validate")
    testing = property(lambda self: self.state.stage == "test")
    predicting = property(lambda self: self.state.stage == "predict")

    _loop = property(lambda self: self.run and self.run.fit_loop)  # None outside of a fit
    # Whether the running batch is the epoch's last: a manual scheduler steps there.
    is_last_batch = property(lambda self: bool(self._loop and self._loop.last))
    enable_validation = property(lambda self: bool(self._loop and self._loop.data.validates))

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps in the whole run; infinity if nothing limits the run.

        Raises UserError before `configure_optimizers`.
        """
        if self._loop is None:
            raise UserError(
                "trainer.estimated_stepping_batches is not known before configure_optimizers "
                "is called: read it in configure_optimizers or later."
            )
        return self._loop.estimated_steps()

    # Lightning's `trainer.fit_loop.max_epochs = 20`: limits and counters are the Trainer's.
    fit_loop = property(lambda self: self)

    @property
    def batch_idx(self) -> int:
        """The index of the running batch in its epoch; -1 before the first."""
        return self._loop.batches_done - 1 if self._loop else -1

    @property
    def model(self) -> nn.Module | None:
        """The strategy's wrapper of the module (e.g. DDP); without one, the module itself."""
        model = self.run.model if self.run else None
        return model.module if isinstance(model, StepModule) else model

    precision_plugin = property(lambda self: self.run.precision if self.run else None)
    datamodule = property(lambda self: self.run.datamodule if self.run else None)
    # This rank's shard of the training data, and the user's validation dataloaders.
    train_dataloader = property(lambda self: self.state.loaders.get("train"))
    val_dataloaders = property(lambda self: self.state.loaders.get("val"))
    # This rank's batches of an epoch, and of each validation dataloader; infinity without a
    # length.
    num_training_batches = property(lambda self: self.state.num_batches.get("train", 0))
    num_val_batches = property(lambda self: self.state.num_batches.get("val", []))

    @property
    def num_devices(self) -> int:
        return len(self.strategy.devices) or self.accelerator.count or 1

    # ---- loggers and callbacks --------------------------------------------------------------

    @property
    def logger(self) -> Logger | None:
        """The first logger. Setting it replaces all loggers; None removes them."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]
        for logger in self.loggers:  # during a run, only rank 0 writes
            logger.is_global_zero = self.is_global_zero

    @property
    def log_dir(self) -> str:
        return (self.loggers[0].log_dir if self.loggers else None) or self.default_root_dir

    # The first callback of each kind, or None.
    checkpoint_callback = property(lambda self: self._first(ModelCheckpoint))
    early_stopping_callback = property(lambda self: self._first(EarlyStopping))
    progress_bar_callback = property(lambda self: self._first(TQDMProgressBar))

    def _first(self, kind: type[Callback]) -> Any:
        return next((cb for cb in self.callbacks if isinstance(cb, kind)), None)


def _run_on_rank(trainer: Trainer, task: Task) -> Any:
    """Run a task in this process, one of the run's ranks."""
    trainer.remember(task.module)
    _use_ddp_hooks(trainer.strategy, task.module)
    trainer.strategy.connect()
    trainer.state.begin(task.stage)
    trainer.run = Run(trainer, task)
    if task.datamodule is not None:
        task.datamodule.trainer = trainer
    return run_stage(trainer.run, task)


def _use_ddp_hooks(strategy: Strategy, module: LightningModule) -> None:
    """Let the module connect the ranks, and wrap the model, as in Lightning before 1.0."""
    if is_overridden("init_ddp_connection", module, LightningModule):
        strategy.init_dist_connection = lambda: module.init_ddp_connection(
            strategy.world.rank, strategy.world.size
        )
    if is_overridden("configure_ddp", module, LightningModule):
        strategy.configure_ddp = module.configure_ddp
