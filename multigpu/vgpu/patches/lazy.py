"""Lazy modules: their parameters get a device before they get a shape.

An uninitialized parameter stays on the host, because its class cannot also be VirtualTensor.
Its attribute `_like`, an empty tensor, has the device and the dtype that it will have.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy


def make(original: Any) -> staticmethod:
    """The `__new__` of an uninitialized parameter or buffer, which can be given a device."""
    new = original.__func__
    signature = inspect.signature(new)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(cls, *args, **kwargs).arguments
        like = torch.empty(0, device=given.get("device"), dtype=given.get("dtype"))
        tensor = new(**{**given, "device": "cpu"})
        tensor._like = like
        return tensor

    return staticmethod(__new__)


def materialize(original: Callable) -> Callable:
    """Gives the parameter its shape, on its device."""

    def materialize(
        self: torch.Tensor, shape: Any, device: Any = None, dtype: Any = None
    ) -> None:
        like = vars(self).pop("_like", self.data)
        new = like.new_empty(shape, device=device or like.device, dtype=dtype or like.dtype)
        self.__class__ = self.cls_to_become
        self.data = new

    return materialize


@contextmanager
def moved(module: torch.nn.Module, fn: Callable) -> Iterator[None]:
    """Move the module's own uninitialized parameters and buffers by `fn`.

    Within the context the module does not have them, so that torch moves the others.
    """
    kept = module._parameters, module._buffers
    module._parameters, module._buffers = (
        {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        for tensors in kept
    )
    try:
        yield
        for tensors, ready in zip(kept, (module._parameters, module._buffers), strict=True):
            tensors.update(ready)
            for tensor in tensors.values():
                if is_lazy(tensor):
                    tensor._like = fn(getattr(tensor, "_like", tensor.data))
    finally:
        module._parameters, module._buffers = kept
