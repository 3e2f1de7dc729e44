"""Trainer.init_module: create a module with the run's precision, on its device."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from multigpu.strategies import DDPStrategy, Strategy
from multigpu.trainer.loops.precision import Precision, default_dtype


class EmptyInit(TorchFunctionMode):
    """A context in which torch.nn.init leaves tensors as they are."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def creating_module(precision: str | int, strategy: Strategy, empty: bool) -> Iterator[None]:
    """A context for the creation of a module.

    A strategy with several processes moves the module when the run begins, because before that
    this process has no rank: the module is created on the CPU.
    """
    ranked = isinstance(strategy, DDPStrategy)
    device = torch.device("cpu") if ranked else strategy.own_devices()[0]
    settings = Precision(precision, device)
    with ExitStack() as contexts:
        contexts.enter_context(device)
        if not settings.mixed:
            contexts.enter_context(default_dtype(settings.dtype))
        if empty:
            contexts.enter_context(EmptyInit())
        yield
