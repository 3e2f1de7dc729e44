"""Who runs the lesson? The Trainer: it holds the settings, starts the ranks, and calls what the user wrote."""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from multigpu.errors import report_user_errors
from multigpu.strategies import Strategy
from multigpu.trainer import arguments, defaults, seed
from multigpu.trainer.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from multigpu.trainer.checkpointing import checkpoint_io
from multigpu.trainer.loops import call_hooks, dataloaders, optimizers, run, spawned
from multigpu.trainer.loops.optimizers import Stepper
from multigpu.trainer.loops.results import Results, Told
from multigpu.trainer.loops.signals import Signals
from multigpu.trainer.module import LightningModule


class Trainer:
    """As Lightning's Trainer, with the strategies that it has dropped: dp, ddp2, horovod, bagua.

    The arguments mean what they mean there. num_nodes=None: as many as the launcher has started. detect_anomaly: stop at the
    first loss or gradient that is not finite, and name it.
    """

    def __init__(
        self, *, accelerator: str = "auto", strategy: str | Strategy = "auto", devices: Any = "auto",
        num_nodes: int | None = None, precision: str | int | None = None, logger: Any = None,
        callbacks: Any = None, fast_dev_run: int | bool = False, max_epochs: int | None = None,
        min_epochs: int | None = None, max_steps: int = -1, min_steps: int | None = None,
        max_time: str | timedelta | dict | None = None, limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None, limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None, overfit_batches: int | float = 0.0,
        val_check_interval: int | float | None = None, check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None, log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None, enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None, accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None, benchmark: bool | None = None, inference_mode: bool = True,
        use_distributed_sampler: bool = True, profiler: Any = None, detect_anomaly: bool = False,
        sync_batchnorm: bool = False, default_root_dir: str | Path | None = None, **old: Any,
    ):  # fmt: skip
        report_user_errors()
        told = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "old", "__class__")
        }
        told |= arguments.understand_old_names(old, told)
        settings = SimpleNamespace(**told)
        self.strategy, self.accelerator = arguments.choose(
            settings.strategy, settings.accelerator, settings.devices, settings.num_nodes
        )
        self.num_nodes = settings.num_nodes or 1
        self.precision = precision or "32-true"
        self.fast_dev_run = int(fast_dev_run)
        self.max_epochs, self.min_epochs, self.max_steps, self.min_steps = (
            max_epochs,
            min_epochs,
            max_steps,
            min_steps,
        )
        self.limit_train_batches, self.limit_val_batches = (
            limit_train_batches,
            limit_val_batches,
        )
        self.limit_test_batches, self.limit_predict_batches = (
            limit_test_batches,
            limit_predict_batches,
        )
        self.overfit_batches, self.accumulate_grad_batches = (
            overfit_batches,
            accumulate_grad_batches,
        )
        self.val_check_interval = 1.0 if val_check_interval is None else val_check_interval
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.gradient_clip_val, self.gradient_clip_algorithm = (
            gradient_clip_val,
            gradient_clip_algorithm,
        )
        self.deterministic, self.benchmark, self.inference_mode = (
            deterministic,
            benchmark,
            inference_mode,
        )
        self.use_distributed_sampler = settings.use_distributed_sampler
        self.detect_anomaly, self.sync_batchnorm = detect_anomaly, sync_batchnorm
        self.enable_model_summary = enable_model_summary is not False
        self.default_root_dir = str(default_root_dir or os.getcwd())
        arguments.check_numbers(self)
        defaults.set_lengths(self)
        self.profiler = defaults.profiler_for(profiler)
        self.loggers = defaults.loggers_for(self, logger)
        self.callbacks = defaults.callbacks_for(
            self, callbacks, enable_checkpointing, enable_progress_bar, max_time
        )
        self._fresh()

    def _fresh(self) -> None:
        """Nothing has run yet."""
        self.current_epoch = self.global_step = self._logged_step = 0
        self.should_stop = self.sanity_checking = self.training = self.interrupted = False
        self._callback_metrics: dict[str, Any] = {}
        self.logged_metrics: dict[str, Any] = {}
        self._bar: dict[str, Any] = {}
        self.last_told: Told | None = None
        self.lightning_module: Any = None
        self.datamodule: Any = None
        self.model: nn.Module | None = None
        self.optimizers: list = []
        self.steppers: list[Stepper] = []
        self.lr_scheduler_configs: list[optimizers.Schedule] = []
        self.fitting: Any = None
        self.evaluating: Any = None
        self.own_transfer: Any = None
        self.precision_plugin: Any = None
        self.num_training_batches: float = 0
        self.val_check_batch: float = 0
        self.num_val_batches: list = []
        self.num_test_batches: list = []
        self.num_predict_batches: list = []
        self.return_predictions, self.weights_only = True, None
        self.val_dataloaders = self.test_dataloaders = self.predict_dataloaders = None
        self.ckpt_path: str | None = None
        self.checkpoint: dict | None = (
            None  # brought back from spawned ranks, which this process could not make
        )
        self.train_dataloader: Any = None
        self.signals = Signals()
        self.state = SimpleNamespace(fn=None)
        self.results = Results(self.strategy.gather_objects, 1, training=False)
        self._warned: set[str] = set()

    # ---- what the user calls ------------------------------------------------------------------------------------

    def fit(self, model: LightningModule, train_dataloaders: Any = None, val_dataloaders: Any = None,
            datamodule: Any = None, ckpt_path: str | Path | None = None, weights_only: bool | None = None) -> None:  # fmt: skip
        """Train; with `ckpt_path` ("best", "last" or a file), go on from there as if the run had never stopped.

        But for bagua's algorithms whose ranks have different weights: a checkpoint holds rank 0's, and all go on from them.
        weights_only=False reads a checkpoint that holds any objects: for files that you trust.
        """
        self.weights_only = weights_only
        self._run(
            "fit", model, datamodule, ckpt_path, train=train_dataloaders, val=val_dataloaders
        )

    def validate(self, model: LightningModule | None = None, dataloaders: Any = None,
                 ckpt_path: str | Path | None = None, verbose: bool = True, datamodule: Any = None,
                 weights_only: bool | None = None) -> list[dict]:  # fmt: skip
        """The metrics over all samples, each once: a dict for each dataloader."""
        self.weights_only = weights_only
        return self._told(
            self._run("validate", model, datamodule, ckpt_path, val=dataloaders), verbose
        )

    def test(self, model: LightningModule | None = None, dataloaders: Any = None,
             ckpt_path: str | Path | None = None, verbose: bool = True, datamodule: Any = None,
             weights_only: bool | None = None) -> list[dict]:  # fmt: skip
        """As `validate`, by `test_step`."""
        self.weights_only = weights_only
        return self._told(
            self._run("test", model, datamodule, ckpt_path, test=dataloaders), verbose
        )

    def predict(self, model: LightningModule | None = None, dataloaders: Any = None, datamodule: Any = None,
                return_predictions: bool | None = None, ckpt_path: str | Path | None = None,
                weights_only: bool | None = None) -> list | None:  # fmt: skip
        """What `predict_step` gave for each batch, in order, from all ranks, on all ranks; None if that is not wanted."""
        self.return_predictions, self.weights_only = (
            return_predictions is not False,
            weights_only,
        )
        return self._run("predict", model, datamodule, ckpt_path, predict=dataloaders)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None) -> None:
        """Write one now, in Lightning's form. All ranks must call it; rank 0 writes."""
        checkpoint_io.save(self, filepath, bool(weights_only))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On rank 0 alone, without tearing the progress bar."""
        if self.is_global_zero:
            bar = self.progress_bar_callback
            (bar.print if bar else print)(*args, **kwargs)

    # ---- a run --------------------------------------------------------------------------------------------------

    def _run(
        self, stage: str, model: Any, datamodule: Any, ckpt_path: Any, **loaders: Any
    ) -> Any:
        if model is None:
            model, saver = self.lightning_module, self.checkpoint_callback
            if (
                ckpt_path is None and saver is not None and saver.best_model_path
            ):  # as Lightning does
                ckpt_path = "best"
                self.print(f"{stage}: with the weights of {saver.best_model_path}")
        for name, loader in loaders.items():
            if hasattr(loader, "train_dataloader") and not isinstance(
                loader, nn.Module
            ):  # fit(model, datamodule)
                datamodule, loaders[name] = loader, None
        run.check_model(stage, model)
        if not getattr(self.strategy, "returns_by_value", False):
            return self.strategy.launch(
                run.run_stage, self, stage, model, datamodule, ckpt_path, loaders
            )
        return spawned.run_stage(self, stage, model, datamodule, ckpt_path, loaders)

    def _told(self, found: list[dict], verbose: bool) -> list[dict]:
        for number, metrics in enumerate(found) if verbose else ():
            if metrics:
                where = f"dataloader {number}: " if len(found) > 1 else ""
                self.print(
                    where
                    + ", ".join(
                        f"{name} {float(value):.4f}" for name, value in metrics.items()
                    )
                )
        return found

    # ---- what the loops and the module call ---------------------------------------------------------------------

    def deal(self, loader: Any, training: bool) -> Any:
        """This rank's share of a dataloader; the loader itself where it is not dealt out."""
        share = loader
        if self.use_distributed_sampler:
            share = dataloaders.deal(
                loader, self.strategy.shard, training, in_order=bool(self.overfit_batches)
            )
        seed.workers_of(share, self.global_rank)
        return share

    def run_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale the loss if need be, and call the hooks around the module's `backward`."""
        learning, scaled = self.fitting.learning, self.precision_plugin.scale(loss)
        if not learning.automatic:
            self.strategy.before_backward(self.model, scaled)
        if learning.before_backward is not None:
            learning.before_backward(scaled)
        self.lightning_module.backward(scaled, *args, **kwargs)
        if learning.after_backward is not None:
            learning.after_backward()

    def run_step(self, optimizer: Any, closure: Callable | None = None) -> None:
        """What `self.optimizers().step(closure)` does, in manual optimization and in an overridden optimizer_step."""
        automatic = self.lightning_module.automatic_optimization
        if optimizers.wants_closure(optimizer) and closure is not None:
            optimizer.step(closure)
        else:
            if closure is not None:
                closure()
            if not automatic:
                self.strategy.synchronize(optimizer)
                self.precision_plugin.unscale(optimizer)
                call_hooks.call(self, "on_before_optimizer_step", optimizer)
            with self.strategy.stepping(optimizer):
                self.precision_plugin.step(optimizer)
        if not automatic:
            self.global_step += 1

    def take(self, told: Told | None) -> None:
        """New values, for callbacks, the bar and whoever looks."""
        self.last_told = told
        if told is not None:
            self._callback_metrics.update(told.callback)
            self.logged_metrics.update(told.log)
            self._bar.update(told.bar)

    def forget(self) -> None:
        """No metric is known yet."""
        self.last_told, self._callback_metrics, self.logged_metrics, self._bar = (
            None,
            {},
            {},
            {},
        )

    def send(self, told: Told | None, step: int | None = None) -> None:
        """New values, for the loggers. They stand at `step`; a user who logs one named "step" has it stand there."""
        if told is None or not told.log or not self.loggers:
            return
        numbers = {"epoch": self.current_epoch} | {
            name: float(value) for name, value in told.log.items()
        }
        at = int(numbers.pop("step", self._logged_step if step is None else step))
        for logger in self.loggers:
            logger.log_metrics(dict(numbers), at)

    def warn_once(self, text: str) -> None:
        key = text.split(" in step")[0]
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=2)

    def profiled(self, name: str, function: Callable) -> Callable:
        if self.profiler is None:
            return function

        def timed(*args: Any) -> Any:
            with self.profiler.profile(name):
                return function(*args)

        return timed

    # ---- where it is --------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Values by name; what the hook that runs has just logged, as this rank knows it."""
        self._callback_metrics.update(self.results.untold())
        return self._callback_metrics

    global_rank = property(lambda self: self.strategy.world.rank)
    local_rank = property(lambda self: self.strategy.world.local_rank)
    world_size = property(lambda self: self.strategy.world.size)
    is_global_zero = property(lambda self: self.strategy.is_global_zero)
    num_devices = property(
        lambda self: len(getattr(self.strategy, "devices", [])) or self.accelerator.count or 1
    )
    logger = property(lambda self: self.loggers[0] if self.loggers else None)
    log_dir = property(
        lambda self: (
            (self.loggers[0].log_dir if self.loggers else None) or self.default_root_dir
        )
    )
    checkpoint_callbacks = property(
        lambda self: [cb for cb in self.callbacks if isinstance(cb, ModelCheckpoint)]
    )
    checkpoint_callback = property(lambda self: next(iter(self.checkpoint_callbacks), None))
    early_stopping_callbacks = property(
        lambda self: [cb for cb in self.callbacks if isinstance(cb, EarlyStopping)]
    )
    early_stopping_callback = property(
        lambda self: next(iter(self.early_stopping_callbacks), None)
    )
    progress_bar_callback = property(
        lambda self: next((c for c in self.callbacks if isinstance(c, ProgressBar)), None)
    )
    progress_bar_metrics = property(
        lambda self: {name: float(value) for name, value in self._bar.items()}
    )
    validating = property(
        lambda self: self.evaluating is not None and self.evaluating.stage == "validate"
    )
    testing = property(
        lambda self: self.evaluating is not None and self.evaluating.stage == "test"
    )
    predicting = property(
        lambda self: self.evaluating is not None and self.evaluating.stage == "predict"
    )
    received_sigterm = property(lambda self: bool(self.signals.asked))
    estimated_stepping_batches = property(lambda self: run.estimated_steps(self))
    is_last_batch = property(lambda self: self.fitting is not None and self.fitting.last)
    node_rank = property(
        lambda self: self.strategy.world.rank // self.strategy.world.local_size
    )
    fit_loop = property(
        lambda self: self
    )  # what Lightning's loop holds is here: trainer.fit_loop.max_epochs = 20
    enable_validation = property(
        lambda self: self.fitting is not None and self.fitting.validation is not None
    )
