"""torch.jit is left out: a function or a module that a program compiles runs in Python.

TorchScript runs in C++, where a virtual GPU has another name, and its modules have parameters
that Python cannot move. The numbers are the same. What torch compiles for itself stays.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
from torch.jit import _builtins

from multigpu.errors import UserError
from multigpu.virtual.left_out import say_once
from multigpu.virtual.sim import names

LEFT_OUT = (
    "torch.jit is left out: script and trace return the module itself, which has no save(). "
    "Write the TorchScript in a run without virtual GPUs, from a state_dict."
)
NOT_READ = (
    "a module of torch.jit does not run on virtual GPUs: make the model in Python, and load "
    "its state_dict()."
)


def compiled_as(original: Callable, replacement: Callable) -> Callable:
    """Let torch's own scripts compile a call of the replacement as one of the original.

    Returns the replacement. torch.jit knows a function by its id, which must not become that
    of another function: keep the replacement until the process ends.
    """
    builtin = _builtins._find_builtin(unwrap(original))
    if builtin is not None:
        _builtins._register_builtin(replacement, builtin)
    return replacement


def script(original: Callable) -> Callable:
    """torch.jit.script: returns what it gets, but for torch's own code."""

    @wraps(original)
    def script(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "torch":
            # torch looks names up in the frame of its caller.
            return original(obj, *args, _frames_up=_frames_up + 1, **kwargs)
        return _as_it_is(obj)

    return script


def trace(original: Callable) -> Callable:
    """torch.jit.trace: returns what it gets."""
    return wraps(original)(lambda func, *args, **kwargs: _as_it_is(func))


def _as_it_is(code: Any) -> Any:
    if isinstance(code, torch.nn.Module):
        say_once(LEFT_OUT)
    return code


def read(original: Callable) -> Callable:
    """torch.jit.load. Raises UserError for a virtual GPU as map_location."""

    @wraps(original)
    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is not None and names.is_virtual(torch.device(map_location)):
            raise UserError(NOT_READ)
        return original(file, map_location, *args, **kwargs)

    return load


def write(original: Callable) -> Callable:
    """torch.jit.save. Raises UserError for a module that was not compiled."""

    @wraps(original)
    def save(module: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(module, torch.jit.ScriptModule):
            raise UserError(LEFT_OUT)
        original(module, *args, **kwargs)

    return save
