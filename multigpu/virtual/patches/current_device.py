"""The current device, for what torch asks of its device guard and of its accelerator.

`torch.vgpu.set_device(1)` makes "vgpu" mean vgpu:1. Factory functions reach dispatch with the
device "vgpu", and dispatch adds the index. `Tensor.to`, torch.tensor and similar functions ask
the device guard in C++ instead, and a guard of Python has index 0 only: these functions get
the index here.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from multigpu.virtual.patches import device_module
from multigpu.virtual.sim.machine import current_index

# These functions make a tensor from data.
FROM_DATA = (
    ("torch", "tensor"),
    ("torch", "as_tensor"),
    ("torch", "asarray"),
    ("torch", "sparse_coo_tensor"),
    ("torch", "sparse_csr_tensor"),
    ("torch.Tensor", "new_tensor"),
)


def with_index(device: Any) -> Any:
    """The device with the current index, if it is "vgpu" without one; else unchanged."""
    if type(device) is str:
        return f"vgpu:{current_index()}" if device == "vgpu" else device
    if type(device) is torch.device and device.type == "vgpu" and device.index is None:
        return torch.device("vgpu", current_index())
    return device


def move(original: Callable) -> Callable:
    """torch.Tensor.to, which Module.to also calls, with the current device."""

    @wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The guard's index is right for the first device, and most programs use no other one.
        if current_index():
            if args:
                args = (with_index(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = with_index(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


# A cache, because TorchScript keeps the id of each replacement until the process ends.
@cache
def make_from_data(original: Callable) -> Callable:
    """torch.tensor and the other functions of FROM_DATA, with the current device."""
    # torch caches a set of its functions at the first `with torch.device(…)`.
    _device._device_constructors()

    @wraps(original)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if current_index():
            # Without an argument, torch takes the device of `with torch.device(…)`.
            device = kwargs.get("device")
            device = with_index(_default_device() if device is None else device)
            if device is not None:
                kwargs["device"] = device
        return original(*args, **kwargs)

    # TorchScript finds torch's functions by their identity.
    operation = torch.jit._builtins._find_builtin(original)
    if operation is not None:
        torch.jit._builtins._register_builtin(made, operation)
    return made


def _default_device() -> torch.device | None:
    """The device of the innermost `with torch.device(…)`, or of set_default_device."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(_get_current_function_mode_stack())
    contexts = (mode for mode in modes if isinstance(mode, _device.DeviceContext))
    return next((context.device for context in contexts), None)


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
