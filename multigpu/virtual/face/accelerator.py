"""torch.accelerator: its functions of torch._C know the one device type of the dispatcher."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.face import driver
from multigpu.virtual.patches import current_device, device_module
from multigpu.virtual.patches.devices import FACE
from multigpu.virtual.patches.replacing import Row, values


def _capability(index: int) -> dict[str, Any]:
    """The dtypes that torch has kernels for: for CUDA all but those of quantized tensors."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {"supported_dtypes": {dtype for dtype in dtypes if not _is_quantized(dtype)}}


def _is_quantized(dtype: torch.dtype) -> bool:
    return str(dtype).startswith(("torch.qint", "torch.quint"))


FUNCTIONS: dict[str, Callable[..., Any]] = current_device.ACCELERATOR | {
    "_accelerator_getAccelerator": lambda: torch._C.device(FACE),
    # FSDP2 makes its device mesh with it, and the mesh sets the rank's device.
    "_get_accelerator": lambda check=None: torch._C.device(FACE),
    "_accelerator_getDeviceCapability": _capability,
    # is_in_use asks whether the program has set the device.
    "_accelerator_setDeviceIndex": driver.set_device,
    "_accelerator_emptyCache": driver.empty_cache,
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_getDeviceStats": driver.memory_stats,
    "_accelerator_resetAccumulatedStats": driver.reset_accumulated_memory_stats,
    "_accelerator_resetPeakStats": device_module.reset_peak_memory_stats,
    "_accelerator_getMemoryInfo": driver.memory_info,
}

ROWS: tuple[Row, ...] = tuple(
    values(["torch._C"], FUNCTIONS, "C++ would ask the device guard, which knows one device")
)
