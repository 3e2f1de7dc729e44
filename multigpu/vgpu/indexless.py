"""Which device is "vgpu" without an index? The current one, as for CUDA; in these few calls torch would take the first.

They ask the device guard before any kernel is called, and the guard that torch offers to Python says 0 (engine.py).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.machine import current_index

CALLS = (
    (torch.Tensor, "to"),
    (torch.Tensor, "new_tensor"),
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
)


def _indexed(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if current_index():
            args, kwargs = map(_named, args), {key: _named(value) for key, value in kwargs.items()}
        return theirs(*args, **kwargs)

    return call


def _named(value: Any) -> Any:
    if isinstance(value, (str, torch.device)) and str(value) == "vgpu":
        return torch.device("vgpu", current_index())
    return value


def install() -> Callable[[], None]:
    """Put these in the place of torch's; calling what is returned takes them away."""
    theirs = [(where, name, vars(where).get(name), getattr(where, name)) for where, name in CALLS]
    for where, name, _, function in theirs:
        setattr(where, name, _indexed(function))

    def undo() -> None:
        for where, name, own, _ in theirs:
            if own is None:  # it is that of Tensor's base class
                delattr(where, name)
            else:
                setattr(where, name, own)

    return undo
