"""The Trainer: it holds the settings, starts the ranks, and runs what the user wrote."""

import inspect
import os
from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError, report_user_errors
from multigpu.strategies import Strategy
from multigpu.trainer import arguments, defaults
from multigpu.trainer.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    ProgressBar,
)
from multigpu.trainer.checkpointing.saving import save_checkpoint
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.loggers import Logger
from multigpu.trainer.loops import run, spawned
from multigpu.trainer.loops.check_model import check_model
from multigpu.trainer.loops.create_module import creating_module
from multigpu.trainer.loops.fit import estimated_steps
from multigpu.trainer.loops.fit_loop_names import FitLoopNames
from multigpu.trainer.loops.optimizer_step import LightningOptimizer
from multigpu.trainer.loops.optimizers import LRSchedulerConfig
from multigpu.trainer.loops.precision import Precision
from multigpu.trainer.loops.results import Results
from multigpu.trainer.loops.state import RunState
from multigpu.trainer.loops.step_module import StepModule
from multigpu.trainer.module import LightningModule
from multigpu.trainer.states import RunningStage, TrainerStatus


class Trainer:
    """Lightning's Trainer, plus the strategies that Lightning has removed: dp, ddp2, horovod,
    bagua.

    The arguments mean the same as in Lightning, with one difference:

    num_nodes   None: as many nodes as the launcher has started

    The arguments become attributes of the same names. Users can change these between runs
    (trainer.max_epochs = 20), and callbacks can change them during a run. The state that
    changes during a run is in `trainer.state`, a RunState. The loops change this state; the
    properties below read it under Lightning's names. Users can set only two of these
    properties: should_stop and optimizers.

    A variable of the environment replaces a default: PL_TRAINER_MAX_EPOCHS=5 is max_epochs=5.
    """

    @arguments.with_environment
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: Any = "auto",
        num_nodes: int | None = None,
        precision: str | int | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        callbacks: Callback | list[Callback] | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = -1,
        min_steps: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        reload_dataloaders_every_n_epochs: int = 0,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        default_root_dir: str | Path | None = None,
        **old: Any,
    ):
        report_user_errors()
        known = inspect.signature(Trainer.__init__).parameters
        translated = arguments.translate_old_names(old, accelerator, strategy, devices, known)
        self.strategy, self.accelerator = arguments.choose(
            translated.get("strategy", strategy),
            translated.get("accelerator", accelerator),
            translated.get("devices", devices),
            translated.get("num_nodes", num_nodes),
        )
        self.precision = precision or "32-true"
        # True and 1 mean the same.
        self.fast_dev_run = bool(fast_dev_run) if fast_dev_run in (0, 1) else fast_dev_run
        self.max_epochs = max_epochs
        self.min_epochs = min_epochs
        self.max_steps = -1 if max_steps is None else max_steps
        self.min_steps = min_steps
        self.limit_train_batches = limit_train_batches
        self.limit_val_batches = limit_val_batches
        self.limit_test_batches = limit_test_batches
        self.limit_predict_batches = limit_predict_batches
        self.overfit_batches = overfit_batches
        self.val_check_interval = 1.0 if val_check_interval is None else val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        if self.num_sanity_val_steps == -1:  # all batches
            self.num_sanity_val_steps = float("inf")
        if log_every_n_steps is None:
            log_every_n_steps = defaults.LOG_EVERY_N_STEPS
        self.log_every_n_steps = log_every_n_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.use_distributed_sampler = translated.get(
            "use_distributed_sampler", use_distributed_sampler
        )
        self.detect_anomaly = detect_anomaly
        self.sync_batchnorm = sync_batchnorm
        self.enable_model_summary = enable_model_summary is not False
        self.default_root_dir = os.path.expanduser(default_root_dir or os.getcwd())
        arguments.check_numbers(self)
        vars(self).update(defaults.run_lengths(self))
        self.loggers = defaults.loggers_for(self, logger)
        self.callbacks = defaults.callbacks_for(
            self, callbacks, enable_checkpointing, enable_progress_bar
        )
        self.state = RunState(Results(self.strategy.gather_objects, 1, training=False))

    @staticmethod
    def add_argparse_args(parser: ArgumentParser) -> ArgumentParser:
        """Add the Trainer's arguments to a parser, as --max_epochs, as in Lightning 1.x."""
        return arguments.add_to_parser(parser, Trainer)

    @classmethod
    def from_argparse_args(cls, args: Namespace, **keywords: Any) -> "Trainer":
        """Make a Trainer of the parsed arguments that it knows; `keywords` have precedence."""
        return cls(**{**arguments.from_parsed(args, Trainer), **keywords})

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
        self.state.weights_only = weights_only
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        self._run("fit", model, datamodule, ckpt_path, loaders)

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
        self.state.weights_only = weights_only
        metrics = self._run("validate", model, datamodule, ckpt_path, {"val": dataloaders})
        if verbose:
            self._print_metrics(metrics)
        return metrics

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
        self.state.weights_only = weights_only
        metrics = self._run("test", model, datamodule, ckpt_path, {"test": dataloaders})
        if verbose:
            self._print_metrics(metrics)
        return metrics

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
        self.state.return_predictions = return_predictions is not False
        self.state.weights_only = weights_only
        return self._run("predict", model, datamodule, ckpt_path, {"predict": dataloaders})

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None) -> None:
        """Write a checkpoint in Lightning's format. All ranks must call it; rank 0 writes."""
        save_checkpoint(self, filepath, bool(weights_only))

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """A context in which a module is created with the run's precision, on its device.

        empty_init   True: leave the weights uninitialised, because a checkpoint will be loaded
        """
        return creating_module(self.precision, self.strategy, bool(empty_init))

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

    def _run(
        self,
        stage: str,
        model: LightningModule | None,
        datamodule: LightningDataModule | None,
        ckpt_path: str | Path | None,
        loaders: dict[str, Any],
    ) -> Any:
        if model is None:
            model = self.state.lightning_module
            saver = self.checkpoint_callback
            # Without a model, use the best checkpoint of the last fit, as Lightning does.
            if ckpt_path is None and saver is not None and saver.best_model_path:
                ckpt_path = "best"
                self.state.warn_once(
                    f"trainer.{stage} without a model uses the weights of "
                    f"{saver.best_model_path}: to say so, give ckpt_path='best'."
                )
        for name, loader in loaders.items():
            # A data module can be given in place of the dataloader: fit(model, datamodule).
            if hasattr(loader, "train_dataloader") and not isinstance(loader, nn.Module):
                datamodule = loader
                loaders[name] = None
        contradicting = [name for name, loader in loaders.items() if loader is not None]
        if datamodule is not None and contradicting:
            raise UserError(
                f"trainer.{stage} was given a data module and {contradicting[0]} dataloaders: "
                f"give one of them only."
            )
        check_model(stage, model)
        if getattr(self.strategy, "trains_in_other_processes", False):
            return spawned.run_stage(self, stage, model, datamodule, ckpt_path, loaders)
        return self.strategy.launch(
            run.run_stage, self, stage, model, datamodule, ckpt_path, loaders
        )

    def _print_metrics(self, of_dataloaders: list[dict[str, float]]) -> None:
        for number, metrics in enumerate(of_dataloaders):
            if metrics:
                prefix = f"dataloader {number}: " if len(of_dataloaders) > 1 else ""
                values = (f"{name} {float(value):.4f}" for name, value in metrics.items())
                self.print(prefix + ", ".join(values))

    # ---- the run: Lightning's names for what is in `state` ----------------------------------

    @property
    def should_stop(self) -> bool:
        """True ends training after this batch, but not before min_epochs and min_steps."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        self.state.should_stop = should_stop

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.state.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self.state.optimizers = optimizers
        self.state.lightning_optimizers = [
            LightningOptimizer(optimizer, self.state, self.strategy)
            for optimizer in optimizers
        ]

    @property
    def current_epoch(self) -> int:
        """The number of completed epochs; during an epoch, this epoch's index from 0."""
        return self.state.progress.current_epoch

    @property
    def global_step(self) -> int:
        """The number of optimizer steps done."""
        return self.state.progress.global_step

    @property
    def _logged_step(self) -> int:
        """The number of batches that ended with an optimizer step: the loggers' x axis."""
        return self.state.progress.batches_that_stepped

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Logged values by name, including those that this rank has just logged.

        It is the same dict during a run, as in Lightning: callbacks can add values to it.
        """
        return self.state.collect_callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.state.metrics.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        metrics = self.state.metrics.progress_bar
        return {name: float(value) for name, value in metrics.items()}

    @property
    def training(self) -> bool:
        return self.state.stage == RunningStage.TRAINING

    @property
    def sanity_checking(self) -> bool:
        return self.state.sanity_checking

    @property
    def validating(self) -> bool:
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        return self.state.stage == RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        return self.state.stage == RunningStage.PREDICTING

    @property
    def evaluating(self) -> bool:
        """Whether the Trainer validates or tests; a sanity check counts."""
        stage = self.state.stage
        return stage is not None and stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether a SIGTERM or an exception ended the run."""
        return self.state.interrupted or self.state.status == TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        return bool(self.state.sigterm.received)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """What a DistributedSampler of the user's own must be given."""
        num_replicas, rank = self.strategy.shard
        return {"num_replicas": num_replicas, "rank": rank}

    @property
    def is_last_batch(self) -> bool:
        loop = self.state.fit_loop
        return loop is not None and loop.last

    @property
    def enable_validation(self) -> bool:
        loop = self.state.fit_loop
        return loop is not None and loop.data.validates

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps in the whole run; infinity if nothing limits the run.

        It is known from `configure_optimizers` on.
        """
        return estimated_steps(self)

    @property
    def fit_loop(self) -> FitLoopNames:
        """Limits and counters of training: Lightning's `trainer.fit_loop.max_epochs = 20`."""
        return FitLoopNames(self)

    @property
    def lightning_module(self) -> LightningModule | None:
        return self.state.lightning_module

    @property
    def datamodule(self) -> LightningDataModule | None:
        return self.state.datamodule

    @property
    def model(self) -> nn.Module | None:
        """The strategy's wrapper of the module (e.g. DDP); without one, the module itself."""
        model = self.state.model
        return model.module if isinstance(model, StepModule) else model

    @property
    def precision_plugin(self) -> Precision | None:
        return self.state.precision

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.state.lr_scheduler_configs

    @property
    def train_dataloader(self) -> Any:
        """This rank's shard of the training dataloader."""
        return self.state.data.train_dataloader

    @property
    def val_dataloaders(self) -> Any:
        """The unsharded dataloaders; test_ and predict_dataloaders are also unsharded."""
        return self.state.data.val_dataloaders

    @property
    def test_dataloaders(self) -> Any:
        return self.state.data.test_dataloaders

    @property
    def predict_dataloaders(self) -> Any:
        return self.state.data.predict_dataloaders

    @property
    def num_training_batches(self) -> float:
        """Batches per epoch on this rank; infinity if the dataloader has no length."""
        return self.state.data.num_training_batches

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation dataloader on this rank.

        num_test_batches and num_predict_batches count the same for their stages.
        """
        return self.state.data.num_val_batches

    @property
    def num_test_batches(self) -> list[float]:
        return self.state.data.num_test_batches

    @property
    def num_predict_batches(self) -> list[float]:
        return self.state.data.num_predict_batches

    @property
    def val_check_batch(self) -> float:
        """Training batches between two validations; infinity: validate at the epoch's end."""
        return self.state.data.val_check_batch

    @property
    def return_predictions(self) -> bool:
        return self.state.return_predictions

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the last run loaded; None if it loaded none."""
        return self.state.ckpt_path

    # ---- the ranks --------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        return self.strategy.world.rank

    @property
    def local_rank(self) -> int:
        return self.strategy.world.local_rank

    @property
    def node_rank(self) -> int:
        return self.strategy.world.rank // self.strategy.world.local_size

    @property
    def num_nodes(self) -> int:
        """The number of nodes, also if the launcher and not the argument decided it."""
        return self.strategy.nodes

    @property
    def world_size(self) -> int:
        return self.strategy.world.size

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.is_global_zero

    @property
    def num_devices(self) -> int:
        return len(self.strategy.devices) or self.accelerator.count or 1

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices."""
        return list(self.accelerator.indices or range(self.num_devices))

    # ---- loggers and callbacks --------------------------------------------------------------

    @property
    def logger(self) -> Logger | None:
        """The first logger. Setting it replaces all loggers; None removes them."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def loggers(self) -> list[Logger]:
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        self._loggers = loggers or []

    @property
    def log_dir(self) -> str:
        return (self.loggers[0].log_dir if self.loggers else None) or self.default_root_dir

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [cb for cb in self.callbacks if isinstance(cb, ModelCheckpoint)]

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        return [cb for cb in self.callbacks if isinstance(cb, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        return next((cb for cb in self.callbacks if isinstance(cb, ProgressBar)), None)
