"""One optimizer step, the same for automatic and manual optimization."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from multigpu.strategies import Strategy
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loops import call_hooks
from multigpu.trainer.module import LightningModule
from multigpu.trainer.refused import refuse

if TYPE_CHECKING:
    from multigpu.trainer.loops.state import RunState
    from multigpu.trainer.trainer import Trainer


class OptimizerStep:
    """Averages, unscales and clips the gradients, calls hooks, and steps the optimizer.

    `apply(optimizer, **keywords)` is Precision.step in the strategy's context, and `prepare`
    does everything before that. In automatic optimization, the training step calls both for
    each batch that completes a step. In manual optimization, `self.optimizers().step()` calls
    both; the user clips the gradients.
    """

    def __init__(self, trainer: "Trainer"):
        state = trainer.state
        module = state.lightning_module
        self.trainer = trainer
        self.module = module
        self.precision = state.precision
        self.progress = state.progress
        self.automatic = module.automatic_optimization
        # A strategy that overrides neither method costs nothing per step.
        strategy = trainer.strategy
        has_synchronize = is_overridden("synchronize", strategy, Strategy)
        has_context = is_overridden("optimizer_step_context", strategy, Strategy)
        self.synchronize = strategy.synchronize if has_synchronize else None
        self.step_context = strategy.optimizer_step_context if has_context else None
        self.before_step = call_hooks.lookup(trainer, "on_before_optimizer_step")
        self.overrides_clipping = is_overridden(
            "configure_gradient_clipping", module, LightningModule
        )
        self.step = self.precision.step
        # Without a context, step is called directly: that saves a call per step.
        self.apply = self.step if self.step_context is None else self._step_in_context

    def prepare(self, optimizer: Optimizer) -> None:
        """Average, unscale and clip the gradients, after the last backward of a step."""
        if self.synchronize is not None:
            self.synchronize(optimizer)
        if self.precision.scaler is not None:
            self.precision.unscale(optimizer)
        if self.before_step is not None:
            self.before_step(optimizer)
        if not self.automatic:
            return
        clip = self.trainer.gradient_clip_val
        if clip is not None or self.overrides_clipping:
            algorithm = self.trainer.gradient_clip_algorithm
            self.module.configure_gradient_clipping(
                optimizer, gradient_clip_val=clip, gradient_clip_algorithm=algorithm
            )

    def _step_in_context(self, optimizer: Optimizer, **keywords: Any) -> Any:
        """Call Precision.step in the strategy's context."""
        with self.step_context(optimizer):
            return self.step(optimizer, **keywords)

    def run(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
        **keywords: Any,
    ) -> Any:
        """Step the optimizer: `self.optimizers().step(closure, **keywords)` calls it.

        A closure, which computes the loss and the gradients, is called once, before the step.
        Returns what `optimizer.step` returns, or else what the closure returned.

        In automatic optimization, the module's optimizer_step calls it. There, the closure
        calls `prepare`, and TrainingStep counts the step.
        """
        loss = None if closure is None else closure()
        if not self.automatic:
            self.prepare(optimizer)
        returned = self.apply(optimizer, **keywords)
        if not self.automatic:
            self.progress.global_step += 1
        return loss if returned is None else returned


class LightningOptimizer:
    """What `self.optimizers()` returns: an optimizer whose `step` runs an OptimizerStep."""

    def __init__(self, optimizer: Optimizer, state: "RunState", strategy: Strategy):
        self.optimizer = optimizer
        self._state = state
        self._strategy = strategy

    @property
    def __class__(self) -> type:
        """The optimizer's class, so that isinstance(…, Optimizer) holds, as torch's schedulers
        require.
        """
        return type(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Step, and return what `optimizer.step(closure, **keywords)` returns."""
        return self._state.optimizer_step.run(self.optimizer, closure, **keywords)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """A context in which only this optimizer's parameters require gradients.

        sync_grad   False: in addition, the ranks do not exchange gradients
        """
        state = self._state
        exchange = nullcontext() if sync_grad else self._strategy.no_sync(state.model)
        with exchange, state.lightning_module.toggled_optimizer(self.optimizer):
            yield

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by copy and pickle: the copy is one of the optimizer, with its own `step`."""
        return self.optimizer.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def check_closure(optimizer: Optimizer) -> None:
    """Raises UserError if the optimizer calls its closure itself, and perhaps several times.

    LBFGS does, and an optimizer whose `step` has a closure without a default, such as SAM.
    """
    closure = signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is closure.empty
    if required or isinstance(optimizer, torch.optim.LBFGS):
        refuse("closure", f"{type(optimizer).__name__}.step")
