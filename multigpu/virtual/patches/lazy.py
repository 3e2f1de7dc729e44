"""Parameters and buffers of lazy modules, such as torch.nn.LazyLinear, before the first batch.

torch gives them classes of their own, which a virtual tensor cannot have. So they stay on the
host without memory, and `place` is the device on which they get it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from multigpu.virtual.ops.tensor import VirtualTensor


def made_on_host(original: staticmethod) -> staticmethod:
    """`__new__` of UninitializedParameter or UninitializedBuffer, for any device."""
    make = original.__func__

    def __new__(
        cls: type,
        requires_grad: bool = make.__defaults__[0],
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> torch.Tensor:
        # Without a device, it is torch's default device.
        empty = torch.empty(0, device=device, dtype=dtype)
        if type(empty) is not VirtualTensor:
            return make(cls, requires_grad, device, dtype, **options)
        made = make(cls, requires_grad, "cpu", empty.dtype, **options)
        made.place = empty.device
        return made

    return staticmethod(__new__)


def place_property(original: None) -> property:
    """The device on which the parameter or buffer gets its memory."""

    def device(self: torch.Tensor) -> torch.device:
        return vars(self).get("place") or torch.Tensor.device.__get__(self)

    return property(device)


def copied_to_its_place(original: Callable) -> Callable:
    """UninitializedParameter.__deepcopy__; torch's own asks the data for the device."""

    def __deepcopy__(self: torch.Tensor, memo: dict) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.requires_grad, self.device, self.dtype)
        return memo[id(self)]

    return __deepcopy__


def materialize(
    self: torch.Tensor,
    shape: torch.Size,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Turn an uninitialized parameter or buffer into an ordinary one with memory."""
    device = self.device if device is None else device
    new = torch.empty(shape, device=device, dtype=dtype or self.dtype)
    vars(self).pop("place", None)
    # Before the data, which give the tensor the class of a virtual one.
    self.__class__ = self.cls_to_become
    self.data = new


@contextmanager
def moved_apart(module: torch.nn.Module, move: Callable) -> Iterator[None]:
    """Hide a module's lazy parameters and buffers in the block, and move them at its end.

    `move` is what Module._apply gets: it returns a tensor on another device or of another
    dtype.
    """
    hidden = [
        (members, name, tensor)
        for members in (module._parameters, module._buffers)
        for name, tensor in members.items()
        if is_lazy(tensor)
    ]
    for members, name, _ in hidden:
        # Module._apply leaves out None. The order of the members stays.
        members[name] = None
    try:
        yield
    finally:
        for members, name, tensor in hidden:
            members[name] = tensor
    for _, _, tensor in hidden:
        moved = move(torch.empty(0, device=tensor.device, dtype=tensor.dtype))
        tensor.data = torch.empty(0, device="cpu", dtype=moved.dtype)
        tensor.place = moved.device
