"""Tensors show the device "cuda:i", and functions with a device take it.

To torch's C++ code the tensors stay on "vgpu:i". What goes through torch's dispatcher to a
virtual tensor is translated there (ops/dispatch.py). The rows below are for the rest:
methods and functions that look at a device before the dispatcher does.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

from multigpu.virtual.face.devices import Device, inner
from multigpu.virtual.face.typed_tensors import type_named
from multigpu.virtual.patches import pinned
from multigpu.virtual.patches.replacing import Registration, Replacement, Row
from multigpu.virtual.sim import names

Tensor = torch.Tensor


def _shown_device(original: Any) -> property:
    own = original.__get__
    shown = {device: names.show(device) for device in _inner_devices()}

    def device(self: Tensor) -> torch.device:
        device = own(self)
        return shown.get(device, device)

    return property(device)


def _inner_devices() -> list[torch.device]:
    return [Device(names.INNER, index) for index in range(128)]


def _is_cuda(original: Any) -> property:
    own = torch._C.TensorBase.device.__get__
    # Under a torch function mode, C++ calls the replaced `device` here.
    return property(lambda self: names.is_virtual(own(self)))


def _to(original: Callable) -> Callable:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:
            first = args[0]
            translated = inner(first)
            if translated is not first:
                args = (translated, *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = inner(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _cuda(original: Callable) -> Callable:
    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        target = inner("cuda" if device is None else device)
        if target.type != names.INNER:
            # CUDA's wording.
            raise RuntimeError("Invalid device, must be cuda device")
        return Tensor.to(self, target, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _type(original: Callable) -> Callable:
    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **more: Any) -> Any:
        if dtype is None:
            return original(self).replace(f"torch.{names.INNER}.", "torch.cuda.")
        cuda_type = type_named(dtype)
        if cuda_type is None:
            return original(self, dtype, non_blocking, **more)
        target = self.device if self.is_cuda else inner("cuda")
        return self.to(target, cuda_type.dtype, non_blocking=non_blocking)

    return type_


def _with_inner_device(original: Callable) -> Callable:
    """The function with its keyword argument `device` translated."""

    def translated(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = inner(kwargs["device"])
        return original(*args, **kwargs)

    translated.__name__ = original.__name__
    translated.__doc__ = original.__doc__
    translated.__wrapped__ = original
    return translated


def _constructor(original: Callable) -> Callable:
    """One of _CONSTRUCTORS with its device translated; pinned memory needs no driver."""
    return _with_inner_device(pinned.pinning(original))


def _make_wrapper_subclass(original: Any) -> staticmethod:
    """Wrappers around a tensor, such as DTensor, are made with the inner device, too."""
    function = original.__func__ if isinstance(original, staticmethod) else original

    def make(*args: Any, **kwargs: Any) -> Tensor:
        for name in ("device", "device_for_backend_keys"):
            if kwargs.get(name) is not None:
                kwargs[name] = inner(kwargs[name])
        # A nested tensor of the jagged layout passes all its arguments by position.
        args = tuple(inner(value) if type(value) is Device else value for value in args)
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
            given = args[0] if args else next(iter(kwargs.values()), None)
            return names.show(device) if isinstance(given, int) else device

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    return Devices("device", (), {"__module__": "torch", "__doc__": original.__doc__})


def _default_device(original: Callable) -> Callable:
    """torch.set_default_device("cuda"), also for the functions that need the inner device."""

    def function(
        self: Any, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INNER_ONLY and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": inner(self.device)}
        return original(self, func, types, args, kwargs)

    return function


# ---- the rows ------------------------------------------------------------------------------

_CONSTRUCTORS = (
    "tensor",
    "as_tensor",
    "asarray",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_compressed_tensor",
)
_INNER_ONLY = {unwrap(getattr(torch, name)) for name in _CONSTRUCTORS}
_CONSTRUCTED = "it asks for CUDA before torch's dispatcher sees the device"


def _register_builtins() -> None:
    """Let torch.jit.script compile calls of what is replaced above as before."""
    from torch.jit._builtins import _find_builtin, _register_builtin

    _register_builtin(torch.device, _find_builtin(Device))
    for name in _CONSTRUCTORS:
        function = getattr(torch, name)
        operation = _find_builtin(unwrap(function))
        if operation is not None:
            _register_builtin(function, operation)


ROWS: tuple[Row, ...] = (
    Replacement("torch.Tensor", "device", _shown_device, "C++ shows the inner device"),
    Replacement("torch.Tensor", "is_cuda", _is_cuda, "C++ knows virtual GPUs as vgpu only"),
    Replacement("torch.Tensor", "to", _to, "C++ would ask for CUDA's kernels"),
    Replacement("torch.Tensor", "cuda", _cuda, "C++ would ask for CUDA's kernels"),
    Replacement("torch.Tensor", "type", _type, "C++ would say torch.vgpu.FloatTensor"),
    Replacement("torch.Tensor", "new_tensor", _with_inner_device, _CONSTRUCTED),
    Replacement(
        "torch.Tensor",
        "_make_wrapper_subclass",
        _make_wrapper_subclass,
        "a wrapper such as DTensor must have the inner device, for autograd's streams",
    ),
    *(Replacement("torch", name, _constructor, _CONSTRUCTED) for name in _CONSTRUCTORS),
    Replacement("torch", "device", _device_class, "torch.device(1) would be vgpu:1"),
    Registration(
        ("torch.jit._builtins._builtin_table",),
        _register_builtins,
        "torch.jit.script knows functions by their identity",
    ),
    Replacement(
        "torch.utils._device.DeviceContext",
        "__torch_function__",
        _default_device,
        "the default device reaches constructors below their replacements",
    ),
)
