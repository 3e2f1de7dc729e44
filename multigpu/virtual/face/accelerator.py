"""torch.accelerator: its functions of torch._C know the one device type of the dispatcher."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.patches.replacing import Replacement, Row
from multigpu.virtual.face import driver
from multigpu.virtual.face.devices import FACE


def _capability(index: int) -> dict[str, Any]:
    """The dtypes that a GPU computes with, as torch says for CUDA."""
    return {"supported_dtypes": set(torch.testing.get_all_dtypes())}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_accelerator_getAccelerator": lambda: torch._C.device(FACE),
    # FSDP2 makes its device mesh with it, and the mesh sets the rank's device.
    "_get_accelerator": lambda check=None: torch._C.device(FACE),
    "_accelerator_getDeviceIndex": driver.current_device,
    "_accelerator_setDeviceIndex": driver.set_device,
    "_accelerator_exchangeDevice": driver.exchange_device,
    "_accelerator_maybeExchangeDevice": driver.exchange_device,
    "_accelerator_getStream": lambda index: torch.cuda.current_stream(index),
    "_accelerator_setStream": lambda stream: torch.cuda.set_stream(stream),
    "_accelerator_synchronizeDevice": driver.synchronize,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_emptyCache": driver.empty_cache,
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_getDeviceStats": driver.memory_stats,
    "_accelerator_resetAccumulatedStats": driver.reset_accumulated_memory_stats,
    "_accelerator_resetPeakStats": driver.reset_peak_memory_stats,
    "_accelerator_getMemoryInfo": driver.memory_info,
}

ROWS: tuple[Row, ...] = tuple(
    Replacement(
        "torch._C",
        name,
        lambda original, function=function: function,
        "C++ would ask the device guard, which knows one device",
        optional=True,
    )
    for name, function in FUNCTIONS.items()
)
