"""The current device, for what torch asks of its device guard and of its accelerator.

`torch.cuda.set_device(1)` makes "cuda" mean cuda:1. Factory functions reach dispatch with a
device without an index, and dispatch adds it. `Tensor.to`, torch.tensor and similar functions
ask the device guard in C++ instead, and a guard of Python has index 0 only; or they ask CUDA.
So these functions get the inner device with its index here (devices.py).
"""

from collections.abc import Callable
from functools import cache, wraps
from inspect import unwrap
from typing import Any

import torch

from multigpu.virtual.patches import device_module, pinned
from multigpu.virtual.patches.devices import inner_device
from multigpu.virtual.patches.replacing import Replacement, Row
from multigpu.virtual.patches.scripting import compiled_as
from multigpu.virtual.sim.machine import current_index

# These functions make a tensor from data.
CONSTRUCTORS = (
    "tensor",
    "as_tensor",
    "asarray",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "sparse_csc_tensor",
    "sparse_compressed_tensor",
)
_ORIGINALS = {unwrap(getattr(torch, name)) for name in CONSTRUCTORS}


def _to(original: Callable) -> Callable:
    """torch.Tensor.to, which Module.to also calls."""

    @wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            first = args[0]
            translated = inner_device(first)
            if translated is not first:
                args = (translated, *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = inner_device(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


# Cached, because `compiled_as` wants the replacement to stay.
@cache
def _with_inner_device(original: Callable) -> Callable:
    """The function with its keyword argument `device` translated."""

    @wraps(original)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = inner_device(kwargs["device"])
        return original(*args, **kwargs)

    return compiled_as(original, translated)


def _constructor(original: Callable) -> Callable:
    """One of CONSTRUCTORS with its device translated; pinned memory needs no driver."""
    return _with_inner_device(pinned.pinning(original))


def _default_device(original: Callable) -> Callable:
    """torch.set_default_device, and `with torch.device(…)`, also for CONSTRUCTORS."""

    def function(
        self: Any, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ORIGINALS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": inner_device(self.device)}
        return original(self, func, types, args, kwargs)

    return function


def exchange(index: int) -> int:
    """Make a device the current one, and return the index of the former one."""
    before = current_index()
    device_module.set_device(index)
    return before


# torch.accelerator's functions are thin layers over those of torch._C.
ACCELERATOR: dict[str, Callable] = {
    "_accelerator_getDeviceIndex": current_index,
    "_accelerator_setDeviceIndex": device_module.set_device,
    "_accelerator_exchangeDevice": exchange,
    "_accelerator_maybeExchangeDevice": exchange,
    "_accelerator_getStream": device_module.current_stream,
    "_accelerator_setStream": device_module.set_stream,
    "_accelerator_synchronizeDevice": device_module.synchronize,
    "_accelerator_isAllocatorInitialized": device_module.is_available,
    "_accelerator_emptyCache": device_module.empty_cache,
}


_INDEX = "it asks the device guard, which knows index 0 only, or CUDA's driver"
ROWS: tuple[Row, ...] = (
    Replacement("torch.Tensor", "to", _to, _INDEX),
    Replacement("torch.Tensor", "new_tensor", _with_inner_device, _INDEX),
    *(Replacement("torch", name, _constructor, _INDEX) for name in CONSTRUCTORS),
    Replacement(
        "torch.utils._device.DeviceContext",
        "__torch_function__",
        _default_device,
        "the default device reaches constructors below their replacements",
    ),
)
