"""torch.jit: modules on a virtual GPU, their files, and calls of replaced functions."""

import functools
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch.jit import _builtins

from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.sim import names


def compiled_as(original: Callable, replacement: Callable) -> Callable:
    """Let torch.jit.script compile a call of the replacement as one of the original.

    Returns the replacement. torch.jit knows a function by its id, which must not become that
    of another function: keep the replacement until the process ends.
    """
    builtin = _builtins._find_builtin(unwrap(original))
    if builtin is not None:
        _builtins._register_builtin(replacement, builtin)
    return replacement


def keep_parameters(module: torch.jit.ScriptModule) -> list[torch.Tensor]:
    """Mark a module's own parameters as such, and return them, to be kept during a move.

    torch reads them from a file as plain tensors, and moves only a Parameter to another class
    of tensor.
    """
    parameters = [tensor for tensor in module._parameters.values() if tensor is not None]
    for tensor in parameters:
        tensor._is_param = True
    return parameters


def read(original: Callable) -> Callable:
    """torch.jit.load: C++ reads the file to the host, and the module then moves."""

    @functools.wraps(original)
    def read(unit: Any, file: Any, device: torch.device | None, *more: Any) -> Any:
        if device is None or not names.is_virtual(device):
            return original(unit, file, device, *more)
        module = original(unit, file, torch.device("cpu"), *more)
        torch.jit._recursive.wrap_cpp_module(module).to(device)
        return module

    return read


def write(original: Callable) -> Callable:
    """torch.jit.save. Raises RuntimeError for a module on a virtual GPU."""

    @functools.wraps(original)
    def save(self: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        if any(type(tensor) is VirtualTensor for tensor in self.state_dict().values()):
            raise RuntimeError(
                "torch.jit.save cannot write a module that is on a virtual GPU, because C++ "
                "copies its storages: save module.cpu(), and load it with map_location."
            )
        return original(self, *args, **kwargs)

    return save
