"""Rows for a module of torch whose import takes long: applied when the program imports it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from multigpu.virtual.patches.replacing import Table


class _Patching(importlib.abc.Loader):
    """Loads a module, and then applies its rows."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[], None]):
        self.loader = loader
        self.patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.patch()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, and lets `patch` change it."""

    def __init__(self, module: str, patch: Callable[[], None]):
        self.module = module
        self.patch = patch

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Patching(spec.loader, self.patch)
        return spec


def when_imported(module: str, table: Table) -> Callable[[], Callable[[], None]]:
    """The change of a Setting: `table`'s rows, now or as soon as `module` is imported."""

    def change() -> Callable[[], None]:
        finder = _Finder(module, table.apply)
        sys.meta_path.insert(0, finder)
        if module in sys.modules:
            table.apply()

        def restore() -> None:
            # Python's end has no list any more.
            if finder in (sys.meta_path or ()):
                sys.meta_path.remove(finder)
            table.undo()

        return restore

    return change
