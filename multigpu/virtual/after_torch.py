"""Calls functions right after a program's `import torch`, wherever that is.

Python imports this module at its start, in every process of a run: it imports little.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_UNTRACK, _TRACK = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track
for _function in (_UNTRACK, _TRACK):
    _function.argtypes, _function.restype = (ctypes.py_object,), None


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
            with _kept():
                execute(module)
            for function in self.functions:
                function()

        loader.exec_module = exec_module
        return spec


@contextmanager
def _kept() -> Iterator[None]:
    """Keep what is made in the block until the process ends, unseen by garbage collection.

    As Python ends, it looks for garbage among torch's modules and takes them apart: 0.4 s of
    the 1.5 s of a process that only imports torch. What existed before is collected as ever,
    so that a program's own objects have their end: a file of its global variables is written.
    """
    before = gc.get_objects()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # torch leaves frames as garbage, which lead to the program's global variables.
        gc.collect()
        gc.freeze()
        # An object that is tracked anew is no longer frozen.
        for one in before:
            if gc.is_tracked(one):
                _UNTRACK(one)
                _TRACK(one)
        if collects:
            gc.enable()
