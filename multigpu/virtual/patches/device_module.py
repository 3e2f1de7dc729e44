"""`torch.vgpu`: the functions of torch.cuda that programs use, for virtual GPUs.

torch's own code calls these, too: DataParallel, autocast, checkpointing, torch.manual_seed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import comm  # noqa: F401  torch.vgpu.comm

from multigpu.virtual.patches import (
    memory_functions,
    nvtx,  # noqa: F401  torch.vgpu.nvtx
    properties,
    random_functions,
    streams,
    typed_tensors,
)
from multigpu.virtual.patches.device_index import Device
from multigpu.virtual.patches.device_index import index_of as _index
from multigpu.virtual.patches.device_index import meter_of as _meter
from multigpu.virtual.sim import machine as _machine
from multigpu.virtual.sim.presets import format_bytes

OutOfMemoryError = torch.OutOfMemoryError

# memory_functions.py
get_per_process_memory_fraction = memory_functions.get_per_process_memory_fraction
memory_snapshot = memory_functions.memory_snapshot
memory_stats = memory_functions.memory_stats
set_per_process_memory_fraction = memory_functions.set_per_process_memory_fraction

# properties.py
can_device_access_peer = properties.can_device_access_peer
get_arch_list = properties.get_arch_list
get_device_capability = properties.get_device_capability
get_device_name = properties.get_device_name
get_device_properties = properties.get_device_properties
utilization = properties.utilization

# random_functions.py
get_rng_state = random_functions.get_rng_state
get_rng_state_all = random_functions.get_rng_state_all
initial_seed = random_functions.initial_seed
manual_seed = random_functions.manual_seed
manual_seed_all = random_functions.manual_seed_all
seed = random_functions.seed
seed_all = random_functions.seed_all
set_rng_state = random_functions.set_rng_state
set_rng_state_all = random_functions.set_rng_state_all

# streams.py
Event = streams.Event
Stream = streams.Stream
StreamContext = streams.StreamContext
current_stream = streams.current_stream
default_stream = streams.default_stream
set_stream = streams.set_stream
stream = streams.StreamContext

# typed_tensors.py: FloatTensor and the like
globals().update(typed_tensors.TYPES)

# torch.utils.checkpoint saves a device's random state only if the device's module has this.
_initialized = True


def is_available() -> bool:
    """Whether virtual GPUs are running in this process."""
    return _machine.running() is not None


def __getattr__(name: str) -> Any:
    # A tuple that belongs to the running machine.
    if name == "default_generators":
        return tuple(_machine.current().generators)
    raise AttributeError(f"module 'torch.vgpu' has no attribute '{name}'")


def is_initialized() -> bool:
    """The same as is_available."""
    return is_available()


def _is_in_bad_fork() -> bool:
    """Whether this process is a fork of the process that started the virtual GPUs."""
    running = _machine.running()
    return running is not None and running.process != os.getpid()


def device_count() -> int:
    """The number of virtual GPUs, 0 if none are running."""
    running = _machine.running()
    return len(running.meters) if running else 0


def current_device() -> int:
    """The index of the device that "vgpu" means in this thread."""
    return _machine.current_index()


def set_device(device: Device) -> None:
    """Make a device the current device, which "vgpu" means in this thread.

    A negative index changes nothing, as in torch.cuda.
    """
    index = _index(device)
    if index >= 0:
        _meter(index)
        _machine.set_current_index(index)


@contextmanager
def device(device: Device) -> Iterator[None]:
    """`with torch.vgpu.device(1):` makes vgpu:1 the current device within the block."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        _machine.set_current_index(before)


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold on the device now.

    Each storage is rounded up to a multiple of 512 bytes, as in CUDA's allocator.
    """
    return _meter(device).allocated


def max_memory_allocated(device: Device = None) -> int:
    """The largest memory_allocated since control.start, or since reset_peak_memory_stats."""
    return _meter(device).peak


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset max_memory_allocated to the memory that is allocated now."""
    _meter(device).reset_peak()


# The old name.
reset_max_memory_allocated = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Reset what was allocated and freed so far, which memory_stats counts."""
    _meter(device).reset_accumulated()


def memory_reserved(device: Device = None) -> int:
    """The same as memory_allocated: a virtual GPU keeps no cache of freed memory."""
    return _meter(device).allocated


max_memory_reserved = max_memory_allocated


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes of the device."""
    meter = _meter(device)
    return meter.free, meter.capacity


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Lines to print: the memory allocated now, its peak, the free memory, the capacity."""
    meter = _meter(device)
    rows = {
        "allocated": meter.allocated,
        "peak": meter.peak,
        "free": meter.free,
        "capacity": meter.capacity,
    }
    lines = [f"{name:<10}{format_bytes(nbytes):>12}" for name, nbytes in rows.items()]
    return "\n".join([f"{meter.device}, {get_device_name(meter.index)}", *lines])


def empty_cache() -> None:
    """Does nothing: a virtual GPU keeps no cache of freed memory."""


def ipc_collect() -> None:
    """Does nothing: processes do not share the memory of a virtual GPU."""


def synchronize(device: Device = None) -> None:
    """On the simulated clock, the host waits until the device has done all its work.

    Does nothing after stop(): the device type stays registered, so torch's profiler calls
    this function for the rest of the process.
    """
    if _machine.running() is None:
        return
    meter = _meter(device)
    if meter.asserted:
        raise meter.assert_error()
    meter.machine.clock.synchronize(meter.index)


def is_current_stream_capturing() -> bool:
    """False: virtual GPUs record no graphs."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast supports."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the current device computes in bfloat16.

    A GPU without bfloat16 units emulates them. As in torch.cuda, emulation counts unless
    including_emulation is False.
    """
    return including_emulation or _meter(None).gpu.bf16
