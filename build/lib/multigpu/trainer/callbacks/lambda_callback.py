"""LambdaCallback: a callback from functions."""

from collections.abc import Callable
from typing import Any

from multigpu.errors import UserError, did_you_mean
from multigpu.trainer.callbacks.callback import Callback


class LambdaCallback(Callback):
    """LambdaCallback(on_train_start=function) calls function(trainer, pl_module) there.

    Each keyword is a method of Callback; the function gets that method's arguments. Raises
    UserError for another keyword.
    """

    def __init__(self, **hooks: Callable[..., Any] | None):
        for name, function in hooks.items():
            if name.startswith("_") or not callable(getattr(Callback, name, None)):
                hint = did_you_mean(name, dir(Callback)) or "see help(Callback)."
                raise UserError(f"LambdaCallback: Callback has no method {name!r}: {hint}")
            if function is not None:
                setattr(self, name, function)
