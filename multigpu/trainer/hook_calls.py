"""Calls a hook of the callbacks, then of the module."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.log import Log
from multigpu.trainer.module import LightningModule

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class Hooks:
    """The hooks of a run. A hook that nobody overrides costs a look into a dict.

    trainer   what callbacks get as their first argument
    """

    def __init__(
        self, trainer: "Trainer", module: LightningModule, callbacks: list[Callback], log: Log
    ):
        self.trainer = trainer
        self.module = module
        self.callbacks = callbacks
        self.log = log
        self.known: dict[str, tuple[list[Callable], Callable | None]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for overrides again: callbacks were added. `self.log` works in all of them."""
        self.known.clear()
        for callback in self.callbacks:
            callback._trainer = self.trainer

    def overrides(self, name: str) -> bool:
        """Whether the module overrides this method."""
        return is_overridden(name, self.module, LightningModule)

    def find(self, name: str) -> tuple[list[Callable], Callable | None]:
        """The callbacks' overrides of the hook, and the module's, or None."""
        hooks = self.known.get(name)
        if hooks is None:
            callbacks = [
                getattr(callback, name)
                for callback in self.callbacks
                if is_overridden(name, callback, Callback)
                and not (callback.monitors and name == "on_train_epoch_end")
            ]
            module_hook = getattr(self.module, name) if self.overrides(name) else None
            hooks = self.known[name] = (callbacks, module_hook)
        return hooks

    def exists(self, name: str) -> bool:
        """Whether anyone overrides the hook."""
        callbacks, module_hook = self.find(name)
        return bool(callbacks) or module_hook is not None

    def call(self, name: str, *args: Any) -> Any:
        """Call all overrides of the hook; return what the module's returned."""
        callbacks, module_hook = self.known.get(name) or self.find(name)
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
