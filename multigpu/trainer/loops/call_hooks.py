"""Calls a hook of the callbacks, then of the module.

A hook that nobody overrides costs nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.early_stopping import EarlyStopping
from multigpu.trainer.callbacks.model_checkpoint import ModelCheckpoint
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.loops.log_context import LogContext
from multigpu.trainer.module import LightningModule

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

# Their on_train_epoch_end is called after the module's, because they monitor what the module
# logs there.
MONITORING = (ModelCheckpoint, EarlyStopping)


def attach_callbacks(trainer: "Trainer") -> None:
    """Give the callbacks the Trainer, so that `self.log` works in them."""
    for callback in trainer.callbacks:
        callback._trainer = trainer


def detach_callbacks(trainer: "Trainer") -> None:
    """Take the Trainer from the callbacks, so that they can be pickled alone."""
    for callback in trainer.callbacks:
        callback._trainer = None


def lookup(trainer: "Trainer", name: str) -> Callable[..., Any] | None:
    """Return a function that calls all overrides of the hook `name`; None if there are none.

    The function returns what the module's own hook returned. Logged values go to the results
    of the loop that is running when `lookup` is called.
    """
    state = trainer.state
    module = state.lightning_module
    first = [cb for cb in trainer.callbacks if is_overridden(name, cb, Callback)]
    last: list[Callback] = []
    if name == "on_train_epoch_end":
        last = [cb for cb in first if isinstance(cb, MONITORING)]
        first = [cb for cb in first if not isinstance(cb, MONITORING)]
    own = getattr(module, name) if is_overridden(name, module, LightningModule) else None
    if not first and not last and own is None:
        return None
    attributes = module.__dict__
    results = state.results
    context = LogContext(results, name)

    def call(*args: Any) -> Any:
        previous = attributes["_log_context"]
        attributes["_log_context"] = context
        try:
            for callback in first:
                getattr(callback, name)(trainer, module, *args)
            answer = own(*args) if own else None
            if last:
                # Reduce the metrics over all ranks, because the callbacks' decisions must be
                # the same on every rank.
                state.metrics.update(results.epoch_metrics())
            for callback in last:
                getattr(callback, name)(trainer, module, *args)
            return answer
        finally:
            attributes["_log_context"] = previous

    return call


def call(trainer: "Trainer", name: str, *args: Any) -> Any:
    """Look up the hook and call it once. Use this outside the loop over batches."""
    hook = lookup(trainer, name)
    return hook(*args) if hook else None
