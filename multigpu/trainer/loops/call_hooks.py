"""Who is called at a hook? The callbacks, then the module. A hook that nobody overrides costs nothing."""

from collections.abc import Callable
from typing import Any

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.early_stopping import EarlyStopping
from multigpu.trainer.callbacks.model_checkpoint import ModelCheckpoint
from multigpu.trainer.hooks import overridden
from multigpu.trainer.module import LightningModule

WATCHERS = (
    ModelCheckpoint,
    EarlyStopping,
)  # at an epoch's end they come last: they watch what the module logs there


def at(trainer: Any, name: str) -> Callable[..., Any] | None:
    """A function that calls the hook `name` wherever it is overridden; it gives back the module's answer. None if nowhere."""
    module = trainer.lightning_module
    first = [cb for cb in trainer.callbacks if overridden(name, cb, Callback)]
    last: list = []
    if name == "on_train_epoch_end":
        first, last = (
            [c for c in first if not isinstance(c, WATCHERS)],
            [c for c in first if isinstance(c, WATCHERS)],
        )
    own = getattr(module, name) if overridden(name, module, LightningModule) else None
    if not first and not last and own is None:
        return None

    def call(*args: Any) -> Any:
        results = trainer.results
        before, results.hook = results.hook, name
        try:
            for callback in first:
                getattr(callback, name)(trainer, module, *args)
            answer = own(*args) if own else None
            if last:  # those of all ranks
                trainer.take(results.epoch_metrics())
            for callback in last:
                getattr(callback, name)(trainer, module, *args)
            return answer
        finally:
            results.hook = before

    return trainer.profiled(name, call)


def call(trainer: Any, name: str, *args: Any) -> Any:
    """Once: for hooks outside the loop over batches."""
    found = at(trainer, name)
    return found(*args) if found else None
