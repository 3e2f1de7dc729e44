"""Calls functions right after a program's `import torch`, wherever that is.

Python imports this module at its start, in every process of a run: it imports little.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    finders = (finder for finder in sys.meta_path if isinstance(finder, After))
    waiting = next((finder for finder in finders if finder.name == "torch"), None)
    if waiting is not None:
        waiting.functions.append(function)
    else:
        sys.meta_path.insert(0, After("torch", function, _kept))


class After:
    """A finder that finds a module as the others do, and calls functions after its import.

    Programs look for a module without importing it, so it stays until the import, which is
    within `around()`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.name = name
        self.functions = [function]
        self.around = around

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The module keeps its loader, which is then as it was found.
            del loader.exec_module
            self.remove()
            with self.around():
                execute(module)
            for function in self.functions:
                function()

        loader.exec_module = exec_module
        return spec

    def remove(self) -> None:
        """Call nothing from now on."""
        # Python's end has no list any more.
        if self in (sys.meta_path or ()):
            sys.meta_path.remove(self)


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
        for obj in before:
            if gc.is_tracked(obj):
                _UNTRACK(obj)
                _TRACK(obj)
        if collects:
            gc.enable()
