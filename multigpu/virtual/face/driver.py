"""What CUDA's driver answers: the functions torch._C._cuda_…, for virtual GPUs.

torch.cuda is Python code above these functions, and runs unchanged. A CPU build of torch lacks
them; a CUDA build has them, but needs a driver. What torch.cuda computes when it is imported
has rows of its own in cuda_module.py.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.patches.replacing import Replacement, Row
from multigpu.vgpu.sim import machine, names
from multigpu.vgpu.sim.memory import LARGE_POOL, Meter
from multigpu.vgpu.sim.workspace import workspace_bytes
from multigpu.virtual.face.properties import properties_of

# The architectures for which torch's kernels are built: those of all presets.
ARCHITECTURES = "sm_70 sm_80 sm_90"
# CUDA 12.8, as cuRuntimeGetVersion writes it.
CUDA_VERSION = 12080


def meter_at(index: int) -> Meter:
    """The meter of cuda:index. Raises torch.AcceleratorError if there is no such GPU."""
    return machine.current().meter(torch._C.device(names.INNER, index))


class _State:
    """What the program has set; forgotten when the face is taken off."""

    device_was_set = False
    sync_debug_mode = 0


def forget() -> None:
    """Forget what an earlier program has set in this process."""
    _State.device_was_set = False
    _State.sync_debug_mode = 0


# ---- devices -------------------------------------------------------------------------------


def is_in_use() -> bool:
    """Whether the program has made a tensor on a GPU, or set the current device."""
    running = machine.running()
    if running is None or running.process != os.getpid():
        return False
    return _State.device_was_set or running.in_use()


def init() -> None:
    """Raise RuntimeError in a fork of a process that has used a GPU, else do nothing."""
    machine.current()


def is_in_bad_fork() -> bool:
    """Whether this process is a fork of one that has used a virtual GPU."""
    running = machine.running()
    return running is not None and running.process != os.getpid()


def device_count() -> int:
    """The number of virtual GPUs in this process; a fork sees them, as on CUDA."""
    running = machine.running()
    return len(running.meters) if running else 0


def current_device() -> int:
    """The index of this thread's current device."""
    return machine.current_index()


def set_device(index: int) -> None:
    """Make cuda:index this thread's current device."""
    machine.set_current_index(meter_at(index).index)
    _State.device_was_set = True


def exchange_device(index: int) -> int:
    """Make cuda:index the current device, and return the one before; -1 changes nothing."""
    if index < 0:
        return -1
    before = machine.current_index()
    machine.set_current_index(meter_at(index).index)
    return before


def get_device_properties(index: int) -> Any:
    """The properties of cuda:index."""
    return properties_of(meter_at(index))


def can_access_peer(index: int, peer: int) -> bool:
    """Whether two GPUs copy directly: all virtual GPUs do, but none with itself."""
    return index != peer


def synchronize(index: int | None = None) -> None:
    """On the simulated clock, the host waits for cuda:index, by default the current GPU.

    Raises torch.AcceleratorError if a kernel of the GPU has asserted.
    """
    meter = meter_at(machine.current_index() if index is None else index)
    if meter.asserted:
        raise meter.assert_error()
    meter.machine.clock.synchronize(meter.index)


def sleep(cycles: int) -> None:
    """The current device is busy for so many cycles of its clock."""
    meter = meter_at(machine.current_index())
    seconds = cycles / (properties_of(meter).clock_rate * 1000)
    meter.machine.clock.compute(meter.index, "sleep", seconds)


def set_sync_debug_mode(mode: int) -> None:
    """Keep the mode. It has no effect: no call warns that the host waits."""
    _State.sync_debug_mode = mode


def get_sync_debug_mode() -> int:
    """The mode that set_sync_debug_mode has kept."""
    return _State.sync_debug_mode


# ---- memory --------------------------------------------------------------------------------


def memory_stats(index: int) -> dict[str, Any]:
    """The counters of CUDA's allocator that a virtual GPU has, as nested dicts.

    A virtual GPU keeps no cache of freed memory, so reserved, active and allocated memory are
    the same. Peaks are known for both pools together only.
    """
    meter = meter_at(index)
    sizes = meter.sizes()
    pools = {
        "all": sizes,
        "small_pool": [size for size in sizes if size < LARGE_POOL],
        "large_pool": [size for size in sizes if size >= LARGE_POOL],
    }
    nbytes = {name: _counter(sum(pool)) for name, pool in pools.items()}
    so_far = meter.accumulated()
    nbytes["all"]["peak"] = meter.peak
    nbytes["all"] |= {"allocated": so_far["bytes allocated"], "freed": so_far["bytes freed"]}
    counts = {name: _counter(len(pool)) for name, pool in pools.items()}
    counts["all"] |= {"allocated": so_far["allocations"], "freed": so_far["frees"]}
    none = {name: _counter(0) for name in pools}
    in_bytes = dict.fromkeys(
        ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"), nbytes
    )
    in_numbers = dict.fromkeys(("allocation", "segment", "active"), counts)
    return {
        **in_bytes,
        **in_numbers,
        "inactive_split": none,
        "inactive_split_bytes": none,
        "oversize_allocations": _counter(0),
        "oversize_segments": _counter(0),
        "max_split_size": -1,
        "num_alloc_retries": 0,
        "num_device_alloc": meter.num_allocations,
        "num_device_free": meter.num_allocations - len(sizes),
        "num_ooms": meter.num_ooms,
        "num_sync_all_streams": 0,
    }


def _counter(current: int) -> dict[str, int]:
    return {"current": current, "peak": current, "allocated": current, "freed": 0}


def reset_peak_memory_stats(index: int) -> None:
    """The peak of cuda:index becomes the memory that is allocated now."""
    meter = meter_at(index)
    meter.reset_peak()


def reset_accumulated_memory_stats(index: int) -> None:
    """What was allocated and freed on cuda:index so far becomes zero."""
    meter_at(index).reset_accumulated()


def memory_info(index: int) -> tuple[int, int]:
    """(free, total) bytes of cuda:index, which other processes can use, too."""
    meter = meter_at(index)
    if meter.asserted:
        raise meter.assert_error()
    return meter.free, meter.capacity


def set_memory_fraction(fraction: float, index: int) -> None:
    """Let this process use only this share of the memory of cuda:index."""
    meter = meter_at(index)
    meter.limit = int(meter.capacity * fraction)


def get_memory_fraction(index: int) -> float:
    """The share of its memory that this process may use of cuda:index."""
    meter = meter_at(index)
    return meter.limit / meter.capacity


def empty_cache() -> None:
    """Give what this process has freed back: other processes can have it."""
    for meter in machine.current().meters:
        meter.give_back()


def memory_snapshot(*arguments: Any) -> dict[str, Any]:
    """Each allocation as a segment with one block; a virtual GPU keeps no history."""
    segments = [
        {
            "device": meter.index,
            "address": 0,
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "requested_size": size,
            "stream": 0,
            "segment_type": "large" if size >= LARGE_POOL else "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": 0,
                    "size": size,
                    "requested_size": size,
                    "state": "active_allocated",
                    "frames": [],
                }
            ],
        }
        for meter in machine.current().meters
        for size in meter.sizes()
    ]
    traces = [[] for _ in machine.current().meters]
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}}


def clear_workspaces() -> None:
    """Free cuBLAS's workspaces: the next matrix product allocates one again."""
    for meter in machine.current().meters:
        meter.workspaces.clear()


def workspace_size() -> int:
    """The bytes of one workspace of cuBLAS."""
    return workspace_bytes(machine.current().gpu.capability)


def _nothing(*arguments: Any, **more: Any) -> None:
    """Does nothing, because a virtual GPU has no cache and no handles."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **more: value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_cuda_init": init,
    "_cuda_isInBadFork": is_in_bad_fork,
    "_cuda_getDeviceCount": device_count,
    "_cuda_getDevice": current_device,
    "_cuda_setDevice": set_device,
    "_cuda_exchangeDevice": exchange_device,
    "_cuda_maybeExchangeDevice": exchange_device,
    "_cuda_canDeviceAccessPeer": can_access_peer,
    "_cuda_getArchFlags": _always(ARCHITECTURES),
    "_cuda_getCompiledVersion": _always(CUDA_VERSION),
    "_cuda_synchronize": synchronize,
    "_cuda_sleep": sleep,
    "_cuda_ipc_collect": _nothing,
    "_cuda_set_sync_debug_mode": set_sync_debug_mode,
    "_cuda_get_sync_debug_mode": get_sync_debug_mode,
    "_cuda_memoryStats": memory_stats,
    "_cuda_resetPeakMemoryStats": reset_peak_memory_stats,
    "_cuda_resetAccumulatedMemoryStats": reset_accumulated_memory_stats,
    "_cuda_hostMemoryStats": _always({}),
    "_cuda_resetPeakHostMemoryStats": _nothing,
    "_cuda_resetAccumulatedHostMemoryStats": _nothing,
    "_cuda_emptyCache": empty_cache,
    "_host_emptyCache": _nothing,
    "_cuda_setMemoryFraction": set_memory_fraction,
    "_cuda_getMemoryFraction": get_memory_fraction,
    "_cuda_memorySnapshot": memory_snapshot,
    "_cuda_record_memory_history": _nothing,
    "_cuda_record_memory_history_legacy": _nothing,
    "_cuda_isHistoryEnabled": _always(False),
    "_cuda_getAllocatorBackend": _always("native"),
    "_cuda_cudaCachingAllocator_enable": _nothing,
    "_cuda_cudaCachingAllocator_is_enabled": _always(False),
    "_cuda_isCurrentStreamCapturing": _always(False),
    "_cuda_clearCublasWorkspaces": clear_workspaces,
    "_cuda_getCublasWorkspaceSize": workspace_size,
    "_cuda_setCublasWorkspaceSize": _nothing,
    "_cuda_getCublasLtWorkspaceSize": _always(0),
    "_cuda_setCublasLtWorkspaceSize": _nothing,
    "_cuda_get_cudnn_benchmark_limit": _always(10),
    "_cuda_set_cudnn_benchmark_limit": _nothing,
}

ROWS: tuple[Row, ...] = tuple(
    Replacement(
        "torch._C",
        name,
        lambda original, function=function: function,
        "CUDA's driver would answer it; torch.cuda's own code then runs unchanged",
        optional=True,
    )
    for name, function in FUNCTIONS.items()
)
