"""What CUDA's driver answers: the functions torch._C._cuda_…, for virtual GPUs.

torch.cuda is Python code above these functions, and runs unchanged. A CPU build of torch lacks
them; a CUDA build has them, but needs a driver. What torch.cuda computes when it is imported
has rows of its own in cuda_module.py.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from multigpu.virtual.face import memory_history
from multigpu.virtual.patches import device_module
from multigpu.virtual.patches.devices import meter_of
from multigpu.virtual.patches.properties import properties_of
from multigpu.virtual.patches.replacing import Row, values
from multigpu.virtual.sim import alloc_conf, machine
from multigpu.virtual.sim.workspace import workspace_bytes

# The architectures for which torch's kernels are built: those of all presets.
ARCHITECTURES = "sm_70 sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"
# CUDA 12.8, as cuRuntimeGetVersion writes it.
CUDA_VERSION = 12080


class _State:
    """What the program has set; forgotten when the face is taken off."""

    device_was_set = False
    sync_debug_mode = 0


def forget() -> None:
    """Forget what an earlier program has set in this process."""
    _State.device_was_set = False
    _State.sync_debug_mode = 0
    alloc_conf.forget()


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


def set_device(index: int) -> None:
    """Make cuda:index this thread's current device."""
    machine.set_current_index(meter_of(index).index)
    _State.device_was_set = True


def exchange_device(index: int) -> int:
    """Make cuda:index the current device, and return the one before; -1 changes nothing."""
    if index < 0:
        return -1
    before = machine.current_index()
    machine.set_current_index(meter_of(index).index)
    return before


def get_device_properties(index: int) -> Any:
    """The properties of cuda:index."""
    return properties_of(meter_of(index))


def can_access_peer(index: int, peer: int) -> bool:
    """Whether two GPUs copy directly: all virtual GPUs do, but none with itself."""
    return index != peer


def sleep(cycles: int) -> None:
    """The current device is busy for so many cycles of its clock."""
    meter = meter_of(None)
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
    """The counters of CUDA's allocator, as nested dicts.

    Allocated, active and requested memory are the same: tensors, in units of 512 bytes. Their
    peaks, and those of inactive splits, are not known for each pool: the current value stands
    for them.
    """
    meter = meter_of(index)
    allocator = meter.allocator
    living = [allocation for allocation in meter.living() if allocation.chunk]
    pools = {"all": living}
    pools["small_pool"] = [part for part in living if part.chunk.pool.small]
    pools["large_pool"] = [part for part in living if not part.chunk.pool.small]
    so_far = meter.accumulated()
    nbytes = {name: _counter(sum(p.nbytes for p in pool)) for name, pool in pools.items()}
    nbytes["all"]["peak"] = meter.peak
    nbytes["all"] |= {"allocated": so_far["bytes allocated"], "freed": so_far["bytes freed"]}
    counts = {name: _counter(len(pool)) for name, pool in pools.items()}
    counts["all"] |= {"allocated": so_far["allocations"], "freed": so_far["frees"]}
    inactive = {"all": None, "small_pool": True, "large_pool": False}
    inactive = {name: allocator.inactive(small) for name, small in inactive.items()}
    segments = allocator.num_segments
    return {
        **dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), nbytes),
        **dict.fromkeys(("allocation", "active"), counts),
        "reserved_bytes": {name: asdict(count) for name, count in allocator.reserved.items()},
        "segment": {name: asdict(count) for name, count in segments.items()},
        "inactive_split": {name: _counter(number) for name, (number, _) in inactive.items()},
        "inactive_split_bytes": {name: _counter(size) for name, (_, size) in inactive.items()},
        "oversize_allocations": _counter(0),
        "oversize_segments": _counter(0),
        "max_split_size": -1,
        "num_alloc_retries": allocator.num_retries,
        "num_device_alloc": segments["all"].allocated,
        "num_device_free": segments["all"].freed,
        "num_ooms": meter.num_ooms,
        "num_sync_all_streams": 0,
    }


def _counter(current: int) -> dict[str, int]:
    return {"current": current, "peak": current, "allocated": current, "freed": 0}


def reset_accumulated_memory_stats(index: int) -> None:
    """What was allocated and freed on cuda:index so far becomes zero."""
    meter = meter_of(index)
    meter.reset_accumulated()
    for count in (*meter.allocator.reserved.values(), *meter.allocator.num_segments.values()):
        count.allocated = count.freed = 0


def memory_info(index: int) -> tuple[int, int]:
    """(free, total) bytes of cuda:index, which other processes can use, too."""
    meter = meter_of(index)
    meter.check_assert()
    return meter.free, meter.capacity


def set_memory_fraction(fraction: float, index: int) -> None:
    """Let this process use only this share of the memory of cuda:index."""
    meter = meter_of(index)
    meter.limit = int(meter.capacity * fraction)


def get_memory_fraction(index: int) -> float:
    """The share of its memory that this process may use of cuda:index."""
    meter = meter_of(index)
    return meter.limit / meter.capacity


def empty_cache() -> None:
    """Give the driver the segments of all GPUs that no tensor uses."""
    for meter in machine.current().meters:
        # What is freed goes to the cache first.
        meter.living()
        meter.allocator.release()
        meter.give_back()


def clear_workspaces() -> None:
    """Free cuBLAS's workspaces: the next matrix product allocates one again."""
    for meter in machine.current().meters:
        meter.workspaces.clear()


def workspace_size() -> int:
    """The bytes of one workspace of cuBLAS on the current GPU."""
    return workspace_bytes(meter_of(None).gpu.capability)


def _nothing(*arguments: Any, **more: Any) -> None:
    """Does nothing, because a virtual GPU has no handles."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **more: value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_cuda_init": init,
    "_cuda_isInBadFork": device_module._is_in_bad_fork,
    "_cuda_getDeviceCount": device_module.device_count,
    "_cuda_getDevice": device_module.current_device,
    "_cuda_setDevice": set_device,
    "_cuda_exchangeDevice": exchange_device,
    "_cuda_maybeExchangeDevice": exchange_device,
    "_cuda_canDeviceAccessPeer": can_access_peer,
    "_cuda_getArchFlags": _always(ARCHITECTURES),
    "_cuda_getCompiledVersion": _always(CUDA_VERSION),
    "_cuda_synchronize": device_module.synchronize,
    "_cuda_sleep": sleep,
    "_cuda_ipc_collect": _nothing,
    "_cuda_set_sync_debug_mode": set_sync_debug_mode,
    "_cuda_get_sync_debug_mode": get_sync_debug_mode,
    "_cuda_memoryStats": memory_stats,
    "_cuda_resetPeakMemoryStats": device_module.reset_peak_memory_stats,
    "_cuda_resetAccumulatedMemoryStats": reset_accumulated_memory_stats,
    "_cuda_hostMemoryStats": _always({}),
    "_cuda_resetPeakHostMemoryStats": _nothing,
    "_cuda_resetAccumulatedHostMemoryStats": _nothing,
    "_cuda_emptyCache": empty_cache,
    "_accelerator_setAllocatorSettings": alloc_conf.set_settings,
    "_host_emptyCache": _nothing,
    "_cuda_setMemoryFraction": set_memory_fraction,
    "_cuda_getMemoryFraction": get_memory_fraction,
    "_cuda_memorySnapshot": memory_history.snapshot,
    "_cuda_record_memory_history": memory_history.record,
    "_cuda_record_memory_history_legacy": memory_history.record_legacy,
    "_cuda_isHistoryEnabled": memory_history.is_enabled,
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
    values(
        ["torch._C"],
        FUNCTIONS,
        "CUDA's driver would answer it; torch.cuda's own code then runs unchanged",
    )
)
