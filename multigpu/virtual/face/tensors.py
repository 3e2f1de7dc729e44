"""Tensors show the device "cuda:i", and functions with a device take it.

To torch's C++ code the tensors stay on "vgpu:i". What goes through torch's dispatcher to a
virtual tensor is translated there (ops/dispatch.py). The rows below are for the rest:
methods and functions that look at a device before the dispatcher does.
"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.face.typed_tensors import type_named
from multigpu.virtual.options import MOST_GPUS
from multigpu.virtual.patches.devices import Device, inner_device
from multigpu.virtual.patches.replacing import Replacement, Row
from multigpu.virtual.sim import names

Tensor = torch.Tensor


def _shown_device(original: Any) -> property:
    """Tensor.device: the shown device of a virtual tensor."""
    device_of = original.__get__
    inner_devices = (Device(names.INNER, index) for index in range(MOST_GPUS))
    shown = {device: names.show(device) for device in inner_devices}

    def device(self: Tensor) -> torch.device:
        device = device_of(self)
        return shown.get(device, device)

    return property(device)


def _is_cuda(original: Any) -> property:
    device_of = torch._C.TensorBase.device.__get__
    # Under a torch function mode, C++ calls the replaced `device` here.
    return property(lambda self: names.is_virtual(device_of(self)))


def _cuda(original: Callable) -> Callable:
    """Tensor.cuda. Raises CUDA's RuntimeError for a device of another type."""

    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        target = inner_device("cuda" if device is None else device)
        if target.type != names.INNER:
            # CUDA's wording.
            raise RuntimeError("Invalid device, must be cuda device")
        return Tensor.to(self, target, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _type(original: Callable) -> Callable:
    """Tensor.type: the names of types have "cuda"; a type of CUDA moves the tensor."""

    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **more: Any) -> Any:
        if dtype is None:
            return original(self).replace(f"torch.{names.INNER}.", "torch.cuda.")
        cuda_type = type_named(dtype)
        if cuda_type is None:
            return original(self, dtype, non_blocking, **more)
        target = self.device if self.is_cuda else inner_device("cuda")
        return self.to(target, cuda_type.dtype, non_blocking=non_blocking)

    return type_


def _make_wrapper_subclass(original: Any) -> staticmethod:
    """Wrappers around a tensor, such as DTensor, are made with the inner device, too."""
    function = original.__func__ if isinstance(original, staticmethod) else original

    def make(*args: Any, **kwargs: Any) -> Tensor:
        for name in ("device", "device_for_backend_keys"):
            if kwargs.get(name) is not None:
                kwargs[name] = inner_device(kwargs[name])
        # A nested tensor of the jagged layout passes all its arguments by position.
        args = tuple(inner_device(value) if type(value) is Device else value for value in args)
        return function(*args, **kwargs)

    return staticmethod(make)


def _device_class(original: type) -> type:
    """torch.device(1) is cuda:1: torch would make it a device of its accelerator, vgpu:1.

    A call makes torch's own devices. The class has no instances. It equals torch's own class,
    as which type(device) and the code that torch.fx writes know it.
    """

    class Devices(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            device = original(*args, **kwargs)
            argument = args[0] if args else next(iter(kwargs.values()), None)
            return names.show(device) if isinstance(argument, int) else device

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    return Devices("device", (), {"__module__": "torch", "__doc__": original.__doc__})


ROWS: tuple[Row, ...] = (
    Replacement("torch.Tensor", "device", _shown_device, "C++ shows the inner device"),
    Replacement("torch.Tensor", "is_cuda", _is_cuda, "C++ knows virtual GPUs as vgpu only"),
    Replacement("torch.Tensor", "cuda", _cuda, "C++ would ask for CUDA's kernels"),
    Replacement("torch.Tensor", "type", _type, "C++ would say torch.vgpu.FloatTensor"),
    Replacement(
        "torch.Tensor",
        "_make_wrapper_subclass",
        _make_wrapper_subclass,
        "a wrapper such as DTensor must have the inner device, for autograd's streams",
    ),
    Replacement("torch", "device", _device_class, "torch.device(1) would be vgpu:1"),
)
