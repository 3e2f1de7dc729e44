"""What checks rely on in a student's process, kept from the answer that runs there.

Python hides nothing within a process: an answer that walks the stack or writes into memory
comes past all of this. lessons/INSTRUCTORS.md says what remains.
"""

import builtins
import copy
import ctypes
import functools
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

# In CPython's struct of a class, on 64 bit: where tp_flags is, and a flag of it.
TYPE_FLAGS = 168
IMMUTABLE_TYPE = 1 << 8


class Given:
    """The cells that are given, and the answer beside them.

    The given cells run in a namespace of their own, which has its own built-in functions. The
    answer gets copies of the functions, and classes that it cannot change. So a check that
    calls a given function calls what was given, also if the answer defines the name, or
    replaces it for a moment.

    names    of the given cells, and after them what the answer defines beside these
    answer   the names that the answer sees
    """

    def __init__(self, answer: dict[str, Any]):
        self.answer = answer
        built_in = vars(builtins) | {"__import__": _import_of(dict(sys.modules))}
        self.kept: dict[str, Any] = {}
        self.names = _keeping(self.kept)
        self.names |= {"__name__": "__main__", "__builtins__": _keeping(built_in)}
        self.given_names = set(self.names)
        sys.addaudithook(self._refuse)

    def run(self, name: str, source: str) -> None:
        """Run a cell that is given."""
        self.kept.clear()
        self.copies: dict[int, Any] = {}
        run_cell(name, source, self.names)
        for key, value in self.names.items():
            if key in ("__name__", "__builtins__"):
                continue
            if isinstance(value, type) and value.__module__ == "__main__":
                _make_immutable(value)
            self.answer[key] = self._copy(value)
        self.given_names = set(self.names)
        self.kept |= self.names

    def _refuse(self, event: str, args: tuple) -> None:
        """Python calls this before it sets a function's code or defaults, or a tracer."""
        if event in ("sys.settrace", "sys.setprofile"):
            raise AttributeError("leave sys without a tracer: it would see what checks call")
        of_function = event == "object.__setattr__" and type(args[0]) is types.FunctionType
        if of_function and args[0].__globals__ is self.names:
            raise AttributeError(f"leave {args[0].__name__} as it is: checks rely on it")

    def find(self, name: str) -> Any:
        """The function that a check calls. Raises NameError if nothing defines it."""
        built_in = self.names["__builtins__"].keys()
        new = self.answer.keys() - self.given_names - built_in
        self.names |= {key: self.answer[key] for key in new}
        if name not in self.names and name not in self.answer:
            raise NameError(f"the answer does not define {name}")
        return self.names[name] if name in self.names else self.answer[name]

    def _copy(self, value: Any) -> Any:
        """A given function as one of the answer's namespace; copies of what may change."""
        if type(value) in (list, tuple, set):
            return type(value)(map(self._copy, value))
        if type(value) is dict:
            return {self._copy(key): self._copy(item) for key, item in value.items()}
        is_copied = type(value).__module__ in ("__main__", "numpy")
        if is_copied or isinstance(value, torch.Tensor | torch.nn.Module):
            return copy.deepcopy(value)
        if not isinstance(value, types.FunctionType) or value.__globals__ is not self.names:
            return value
        if id(value) not in self.copies:
            code, defaults = value.__code__, self._copy(value.__defaults__)
            cells = tuple(types.CellType() for _ in value.__closure__ or ())
            made = types.FunctionType(code, self.answer, value.__name__, defaults, cells)
            made.__kwdefaults__ = self._copy(value.__kwdefaults__)
            self.copies[id(value)] = functools.update_wrapper(made, value)
            # Through it an answer would reach the function that the checks call.
            del made.__wrapped__
            for cell, kept in zip(cells, value.__closure__ or (), strict=True):
                cell.cell_contents = self._copy(kept.cell_contents)
        return self.copies[id(value)]


def run_cell(name: str, source: str, names: dict[str, Any]) -> None:
    """Execute a cell's text; errors name the cell and show its lines."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), names)


def _keeping(kept: dict[str, Any]) -> dict[str, Any]:
    """A namespace in which Python's code finds what is kept, also if it was set to another."""

    class Names(dict):
        def __getitem__(self, name: str) -> Any:
            return kept[name] if name in kept else super().__getitem__(name)

    kept = types.MappingProxyType(kept)
    _make_immutable(Names)
    return Names(kept)


def _import_of(modules: dict[str, types.ModuleType]) -> Callable[..., types.ModuleType]:
    """An import of these modules, also if others have taken their places."""
    original = builtins.__import__

    def import_(*words: Any, **more: Any) -> types.ModuleType:
        sys.modules.update(modules)
        return original(*words, **more)

    return import_


def _make_immutable(cls: type) -> None:
    """Let Python refuse to set a class's attributes, as it does for built-in classes."""
    flags = ctypes.c_ulong.from_address(id(cls) + TYPE_FLAGS)
    if flags.value == cls.__flags__:  # elsewhere in another Python
        flags.value |= IMMUTABLE_TYPE


class _Sealed(types.ModuleType):
    """A module whose attributes a cell cannot set; the library's own code can."""

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse(name)
        super().__delattr__(name)

    @property
    def __dict__(self) -> types.MappingProxyType:
        return types.MappingProxyType(super().__dict__)

    def __dir__(self) -> list[str]:
        return list(super().__dict__)

    def _refuse(self, name: str) -> None:
        # frame 1 is __setattr__
        if sys._getframe(2).f_globals.get("__name__") == "__main__":
            raise AttributeError(f"leave {self.__name__}.{name} as it is: checks rely on it")


def seal() -> None:
    """Seal the modules that are imported."""
    for name, module in list(sys.modules.items()):
        # An answer may set sys.stdout and sys.argv.
        if name != "sys" and type(module) is types.ModuleType:
            module.__class__ = _Sealed
    _make_immutable(_Sealed)
