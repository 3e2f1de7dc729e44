"""Run: what the loops of one call of fit, validate, test or predict work with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from multigpu.devices import to_cpu
from multigpu.strategies import Strategy
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.hooks import DataHooks, is_overridden
from multigpu.trainer.log import Log, LogContext
from multigpu.trainer.module import LightningModule
from multigpu.trainer.optimizers import LRSchedulerConfig
from multigpu.trainer.precision import Precision
from multigpu.trainer.results import Results
from multigpu.trainer.settings import Settings
from multigpu.trainer.state import State

if TYPE_CHECKING:
    from multigpu.trainer.datamodule import LightningDataModule
    from multigpu.trainer.evaluate import EvaluationLoop
    from multigpu.trainer.fit import FitLoop
    from multigpu.trainer.step import LightningOptimizer
    from multigpu.trainer.trainer import Trainer

TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


@dataclass
class Task:
    """What the user calls: fit, validate, test or predict, with its arguments.

    stage           "fit", "validate", "test" or "predict"
    module          the user's module
    datamodule      the user's data module, or None
    loaders         the user's dataloaders by "train", "val", "test", "predict"
    ckpt_path       the checkpoint to load: a path, "best", "last" or None
    weights_only    False: the checkpoint can contain any object
    keeps_outputs   whether "predict" returns the outputs
    """

    stage: str
    module: LightningModule | None
    datamodule: "LightningDataModule | None"
    loaders: dict[str, Any]
    ckpt_path: str | Path | None
    weights_only: bool | None
    keeps_outputs: bool = True


class Run:
    """What the loops of one run share.

    trainer      what callbacks get as their first argument
    settings     the Trainer's arguments, as attributes
    state        counters, metrics and flags, which outlive the run
    module       the user's module; also `datamodule` and `loaders`: see Task
    log          what `self.log` records
    model        the strategy's wrapper of the module; its forward calls a step by name
    precision    how the run computes
    optimizers   the user's optimizers, and in `lightning_optimizers` what self.optimizers()
                 returns
    schedulers   the user's learning-rate schedulers, and when they step
    print        prints on rank 0; `report` only if there is a progress bar
    fit_loop     the loop of a fit; else None
    evaluation   the loop of the evaluation that runs now; else None
    """

    def __init__(self, trainer: "Trainer", task: Task):
        self.trainer = trainer
        self.settings: Settings = trainer
        self.state: State = trainer.state
        self.strategy: Strategy = trainer.strategy
        self.module = module = task.module
        self.datamodule = task.datamodule
        self.loaders = task.loaders
        self.report: Callable[[str], None] = trainer.report
        self.print: Callable[..., None] = trainer.print
        self.callbacks = trainer.callbacks
        self.transfer_hooks = [
            self._overridden(name) or getattr(module, name) for name in TRANSFER_HOOKS
        ]
        results = self.new_results(training=self.state.fn == "fit")
        self.log = Log(trainer, module, results)
        self.model: nn.Module = module
        self.precision: Precision | None = None
        self.optimizers: list[Optimizer] = []
        self.lightning_optimizers: list[LightningOptimizer] = []
        self.schedulers: list[LRSchedulerConfig] = []
        self.fit_loop: FitLoop | None = None
        self.evaluation: EvaluationLoop | None = None
        self.refresh_hooks()

    # ---- hooks: those of the callbacks, then the module's ----------------------------------

    def refresh_hooks(self) -> None:
        """Look for overrides again: callbacks were added. `self.log` works in all of them."""
        # A hook that nobody overrides costs a look into this dict.
        self.known_hooks: dict[str, tuple[list[Callable], Callable | None]] = {}
        for callback in self.callbacks:
            callback._trainer = self.trainer

    def overrides(self, name: str) -> bool:
        """Whether the module overrides this method."""
        return is_overridden(name, self.module, LightningModule)

    def find_hooks(self, name: str) -> tuple[list[Callable], Callable | None]:
        """The callbacks' overrides of the hook, and the module's, or None."""
        hooks = self.known_hooks.get(name)
        if hooks is None:
            callbacks = [
                getattr(callback, name)
                for callback in self.callbacks
                if is_overridden(name, callback, Callback)
                and not (callback.monitors and name == "on_train_epoch_end")
            ]
            module_hook = getattr(self.module, name) if self.overrides(name) else None
            hooks = self.known_hooks[name] = (callbacks, module_hook)
        return hooks

    def call(self, name: str, *args: Any) -> Any:
        """Call all overrides of the hook; return what the module's returned."""
        callbacks, module_hook = self.find_hooks(name)
        if not callbacks and module_hook is None:
            return None
        with self.log.within(name):
            for hook in callbacks:
                hook(self.trainer, self.module, *args)
            return module_hook(*args) if module_hook is not None else None

    def call_monitors(self, name: str) -> None:
        """Call the hook of the callbacks that monitor metrics: see Callback.monitors."""
        with self.log.within(name):
            for callback in self.callbacks:
                if callback.monitors and is_overridden(name, callback, Callback):
                    getattr(callback, name)(self.trainer, self.module)

    # ---- batches and data ------------------------------------------------------------------

    def transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The batch on this rank's device, in the run's precision, through the hooks."""
        before, move, after = self.transfer_hooks
        batch = before(self.precision.convert_batch(batch), dataloader_idx)
        return after(move(batch, self.strategy.device, dataloader_idx), dataloader_idx)

    def new_results(self, training: bool) -> Results:
        """An empty collection for what a loop logs."""
        strategy = self.strategy
        results = Results(strategy.gather_objects, strategy.world.size, training)
        if len(strategy.devices) > 1:  # replicas or stages log parts of a batch
            results.device = strategy.device
        return results

    def has_loader(self, name: str) -> bool:
        """Whether there is a dataloader for `name`: "train", "val", "test" or "predict"."""
        if self.loaders.get(name) is not None:
            return True
        return self._overridden(f"{name}_dataloader") is not None

    def find_loader(self, name: str) -> Any:
        """The user's dataloader, else the data module's, else the module's, else None."""
        if self.loaders.get(name) is not None:
            return self.loaders[name]
        method = self._overridden(f"{name}_dataloader")
        return method() if method is not None else None

    def _overridden(self, name: str) -> Callable[..., Any] | None:
        """The data module's method, if it is overridden there, or else the module's."""
        for source in (self.datamodule, self.module):
            if is_overridden(name, source, DataHooks):
                return getattr(source, name)
        return None

    def move_to_cpu(self) -> None:
        """Move the module and the optimizers' states to the CPU, at the end of a run."""
        self.model = self.module
        if self.fit_loop is not None:
            self.fit_loop.step = None  # it refers to the strategy's wrapper
        if self.strategy.device.type == "vgpu":
            from multigpu.virtual import control

            if not control.computes():
                return  # tensors have only shapes: there are no values to move
        self.module.cpu()
        for optimizer in self.optimizers:
            for key, value in optimizer.state.items():
                optimizer.state[key] = to_cpu(value)


class StepModule(nn.Module):
    """The module that strategies wrap: its forward calls a step of the LightningModule by its
    name, because DDP and DataParallel wrap only `forward`.
    """

    def __init__(self, module: LightningModule):
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any) -> Any:
        attributes = self.module.__dict__
        context = attributes["_log_context"]
        if context.results.device is None:
            return getattr(self.module, name)(*args)
        # In a replica or a pipeline, args[0] is a part of the batch. Its number of rows is the
        # weight of the values that the step logs.
        attributes["_log_context"] = LogContext(context.results, context.hook, args[0])
        try:
            return getattr(self.module, name)(*args)
        finally:
            attributes["_log_context"] = context
