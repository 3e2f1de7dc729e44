"""Calls functions right after a program's `import torch`, wherever that is.

Python imports this module at its start, in every process of a run: it imports little.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call(function: Callable[[], None]) -> None:
    """Call `function` after the import of torch; now, if torch is imported already.

    Several functions are called in the order in which they came here.
    """
    if "torch" in sys.modules:
        function()
        return
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _AfterTorch)]
    if waiting:
        waiting[0].functions.append(function)
    else:
        sys.meta_path.insert(0, _AfterTorch(function))


class _AfterTorch:
    """A finder that finds torch as the others do, and calls the functions after its import.

    Programs look for torch without importing it, so it stays until the import.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.functions = [function]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # torch's module keeps its loader, which is then as it was found.
            del loader.exec_module
            sys.meta_path.remove(self)
            with _without_collection():
                execute(module)
                for function in self.functions:
                    function()

        loader.exec_module = exec_module
        return spec


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage in the block, and never look at its objects again.

    What the import of torch makes stays until the process ends. To look for garbage among it
    takes 0.5 s of the import's 1.4 s.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
