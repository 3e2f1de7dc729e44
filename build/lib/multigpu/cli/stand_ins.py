"""Stand-ins for modules that torch imports but `multigpu scaling` does not need.

When the first optimizer is made, torch asks its compiler, torch._dynamo, to leave some
functions alone. At the first operation of a tensor of a subclass, it asks whether the tensor
is a DTensor, a class in torch.distributed.tensor. Here nothing is compiled and there is no
DTensor, so a stand-in knows the answers. To import both modules takes longer than to predict.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A module with a few names. Any other name comes from the real module, which it loads."""

    def __init__(self, name: str, **names: Any):
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        # Python asks any module for names such as __file__. It asks for __path__ when it
        # imports a submodule.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def enter(self) -> None:
        """Take the place of the real module, unless that is loaded."""
        if self.__name__ not in sys.modules:
            sys.modules[self.__name__] = self
            setattr(*self._place(), self)

    def leave(self) -> None:
        """Make place for the real module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            delattr(*self._place())

    def _place(self) -> tuple[ModuleType, str]:
        """The package, and its attribute that an import sets."""
        package, _, name = self.__name__.rpartition(".")
        return importlib.import_module(package), name


class NoDTensor:
    """Stands in for the class DTensor. Nothing is an instance of it."""


def unchanged(function: Callable, *options: Any, **named: Any) -> Callable:
    """Stands in for torch._dynamo.disable."""
    return function


def nothing(*options: Any, **named: Any) -> None:
    """Stands in for torch._dynamo.graph_break."""


@contextmanager
def installed() -> Iterator[None]:
    """Import torch, and use the stand-ins in the block.

    torch keeps some answers until the process ends, so the stand-ins are for a process that
    has no other use for torch. A process that has imported torch already, such as a test's,
    gets none.
    """
    if "torch" in sys.modules:
        yield
        return
    import torch  # noqa: F401

    stand_ins = [
        StandIn("torch._dynamo", disable=unchanged, graph_break=nothing),
        StandIn("torch.distributed.tensor", DTensor=NoDTensor),
    ]
    for stand_in in stand_ins:
        stand_in.enter()
    try:
        yield
    finally:
        for stand_in in stand_ins:
            stand_in.leave()
