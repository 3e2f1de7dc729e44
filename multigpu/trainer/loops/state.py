"""The state that changes during a run: the loops own it, users read it through the Trainer.

`Progress` has the counters, `Metrics` has the logged values, and `Data` has the dataloaders.
`RunState` joins them with the model, the optimizers and the loops.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from multigpu.devices import to_cpu
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.datamodule import LightningDataModule
from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.loops.optimizers import LRSchedulerConfig
from multigpu.trainer.loops.precision import Precision
from multigpu.trainer.loops.results import Reported, Results
from multigpu.trainer.loops.sigterm import Sigterm
from multigpu.trainer.loops.transfer import BatchTransfer
from multigpu.trainer.module import LightningModule
from multigpu.trainer.states import FIRST_STAGE, RunningStage, TrainerFn, TrainerStatus

if TYPE_CHECKING:
    from multigpu.trainer.loops.evaluate import EvaluationLoop
    from multigpu.trainer.loops.fit import FitLoop
    from multigpu.trainer.loops.optimizer_step import LightningOptimizer, OptimizerStep


@dataclass(slots=True)
class Progress:
    """Counters of the training. Checkpoints contain them, and spawned ranks return them.

    current_epoch          completed epochs
    global_step            optimizer steps
    batches_that_stepped   batches that ended with an optimizer step: the loggers' x axis
    """

    current_epoch: int = 0
    global_step: int = 0
    batches_that_stepped: int = 0


@dataclass(slots=True)
class Metrics:
    """The newest values by name, for each reader.

    callback       for callbacks and schedulers
    logged         for the loggers
    progress_bar   for the progress bar
    latest         the last report, without the values before it
    """

    callback: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, Any] = field(default_factory=dict)
    latest: Reported | None = None

    def update(self, reported: Reported | None) -> None:
        """Add new values; None means that nothing was logged."""
        self.latest = reported
        if reported is not None:
            self.callback.update(reported.callback)
            self.logged.update(reported.logger)
            self.progress_bar.update(reported.progress_bar)

    def clear(self) -> None:
        """Delete all values.

        Makes new dicts, so dicts that a user has kept do not change.
        """
        self.callback = {}
        self.logged = {}
        self.progress_bar = {}
        self.latest = None

    def copy_to_cpu(self) -> "Metrics":
        """A copy that another process can unpickle."""
        return Metrics(to_cpu(self.callback), to_cpu(self.logged), to_cpu(self.progress_bar))


@dataclass(slots=True)
class Data:
    """The dataloaders, and how many of their batches this rank gets.

    train_dataloader        this rank's shard
    val_dataloaders         as the user gave them: not sharded; the same for test and predict
    num_training_batches    this rank's batches per epoch; infinity without a length
    num_val_batches         this rank's batches of each dataloader; the same for test and
                            predict
    val_check_batch         training batches between two validations; infinity: validate at
                            the epoch's end
    """

    train_dataloader: Any = None
    val_dataloaders: Any = None
    test_dataloaders: Any = None
    predict_dataloaders: Any = None
    num_training_batches: float = 0
    num_val_batches: list[float] = field(default_factory=list)
    num_test_batches: list[float] = field(default_factory=list)
    num_predict_batches: list[float] = field(default_factory=list)
    val_check_batch: float = 0


@dataclass(slots=True)
class RunState:
    """The state of one Trainer. The names `status`, `fn` and `stage` are Lightning's.

    status                whether a run is going on, and how the last one ended
    fn                    the method that runs or ran last; None before the first run
    stage                 the part of the run; None between runs
    should_stop           True ends training after this batch; users and callbacks set it
    interrupted           whether a SIGTERM ended the run
    lightning_module      the user's module; None before the first run
    datamodule            the user's data module, or None
    model                 the strategy's wrapper of the module; after a run, the module itself
    precision             how the run computes; None before the first run
    transfer              moves a batch to this rank's device
    optimizers            the user's optimizers
    lightning_optimizers  what `self.optimizers()` returns
    lr_scheduler_configs  the user's schedulers, and when they step
    optimizer_step        averages, unscales and clips gradients, and steps an optimizer
    progress              the counters
    metrics               the newest values, for the readers outside of the loops
    data                  the dataloaders
    results               the values logged in the current loop
    fit_loop              the loop of the last fit; None before the first fit
    evaluation_loop       the loop of the running evaluation; else None
    ckpt_path             the checkpoint from which the last fit resumed
    weights_only          the user's argument: False reads any object from a checkpoint
    return_predictions    whether `predict` keeps the outputs
    spawned_checkpoint    a checkpoint's content from the spawned ranks, because this process
                          cannot make it
    sigterm               whether a SIGTERM came
    warned                the texts that `warn_once` has shown
    """

    results: Results
    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    progress: Progress = field(default_factory=Progress)
    metrics: Metrics = field(default_factory=Metrics)
    data: Data = field(default_factory=Data)
    should_stop: bool = False
    interrupted: bool = False
    lightning_module: LightningModule | None = None
    datamodule: LightningDataModule | None = None
    model: nn.Module | None = None
    precision: Precision | None = None
    transfer: BatchTransfer | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    lightning_optimizers: "list[LightningOptimizer]" = field(default_factory=list)
    lr_scheduler_configs: list[LRSchedulerConfig] = field(default_factory=list)
    optimizer_step: "OptimizerStep | None" = None
    fit_loop: "FitLoop | None" = None
    evaluation_loop: "EvaluationLoop | None" = None
    ckpt_path: str | None = None
    weights_only: bool | None = None
    return_predictions: bool = True
    spawned_checkpoint: dict[str, Any] | None = None
    sigterm: Sigterm = field(default_factory=Sigterm)
    warned: set[str] = field(default_factory=set)

    def begin(
        self, fn: str, module: LightningModule, datamodule: Any, results: Results
    ) -> None:
        """Begin a run: delete the last run's metrics and results, but keep the counters."""
        self.status = TrainerStatus.RUNNING
        self.fn = TrainerFn(fn)
        self.stage = FIRST_STAGE[self.fn]
        self.interrupted = False
        self.lightning_module = module
        self.datamodule = datamodule
        self.results = results
        self.metrics.clear()
        if fn == "fit":
            self.fit_loop = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """The state without loops and dataloaders: a pickled Trainer can begin a run."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        loops = ("fit_loop", "evaluation_loop", "optimizer_step", "transfer")
        state |= dict.fromkeys(loops) | {"lightning_optimizers": [], "data": Data()}
        return None, state

    def finish(self) -> None:
        """End a run that did not fail."""
        self.status = TrainerStatus.INTERRUPTED if self.interrupted else TrainerStatus.FINISHED
        self.stage = None

    def fail(self) -> None:
        """End a run after an exception: no loop is running."""
        self.status = TrainerStatus.INTERRUPTED
        self.stage = None
        self.evaluation_loop = None

    @property
    def finished(self) -> bool:
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last run is over, also after an exception."""
        return self.status.stopped

    @property
    def sanity_checking(self) -> bool:
        return self.stage == RunningStage.SANITY_CHECKING

    def end_hooks(self) -> None:
        """After an exception in a hook: no hook runs, so `self.log` raises an error again."""
        if self.lightning_module is not None:
            self.lightning_module.__dict__["_log_context"] = LogContext(self.results)

    @contextmanager
    def running_hook(self, hook: str, batch_size: int | None = None) -> Iterator[None]:
        """A context in which `hook` is the running hook, if call_hooks does not call it.

        batch_size   see LogContext
        """
        attributes = self.lightning_module.__dict__
        previous = attributes["_log_context"]
        attributes["_log_context"] = LogContext(self.results, hook, batch_size=batch_size)
        try:
            yield
        finally:
            attributes["_log_context"] = previous

    def collect_callback_metrics(self) -> dict[str, Any]:
        """Add the values that this rank has just logged to metrics.callback, and return it."""
        context = getattr(self.lightning_module, "_log_context", None)
        if context is not None:
            self.metrics.callback.update(self.results.unreported(context.hook))
        return self.metrics.callback

    def warn_once(self, text: str) -> None:
        """Warn, unless the same text was shown before, for this or another step."""
        key = text.split(" in step")[0]
        if key not in self.warned:
            self.warned.add(key)
            if is_rank_zero():
                warnings.warn(text, stacklevel=2)
