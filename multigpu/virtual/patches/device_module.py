"""`torch.vgpu`: what torch, the Trainer and the tests ask of the device type's own module.

torch's code calls most of it: DataParallel, autocast, checkpointing, torch.manual_seed.
Programs say cuda, and have torch.cuda's own functions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from multigpu.virtual.patches import random_functions, streams
from multigpu.virtual.patches.devices import DeviceLike
from multigpu.virtual.patches.devices import index_of as _index
from multigpu.virtual.patches.devices import meter_of as _meter
from multigpu.virtual.patches.properties import DeviceProperties, properties_of
from multigpu.virtual.sim import machine as _machine

# random_functions.py
get_rng_state = random_functions.get_rng_state
get_rng_state_all = random_functions.get_rng_state_all
manual_seed = random_functions.manual_seed
manual_seed_all = random_functions.manual_seed_all
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

# torch.utils.checkpoint saves a device's random state only if the device's module has this.
_initialized = True


def is_available() -> bool:
    """Whether virtual GPUs are running in this process."""
    return _machine.running() is not None


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


def set_device(device: DeviceLike) -> None:
    """Make a device the current device, which "vgpu" means in this thread.

    A negative index changes nothing, as in torch.cuda.
    """
    index = _index(device)
    if index >= 0:
        _meter(index)
        _machine.set_current_index(index)


@contextmanager
def device(device: DeviceLike) -> Iterator[None]:
    """`with torch.vgpu.device(1):` makes vgpu:1 the current device within the block."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        _machine.set_current_index(before)


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors hold on the device now.

    Each storage is rounded up to a multiple of 512 bytes, as in CUDA's allocator.
    """
    return _meter(device).allocated


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The largest memory_allocated since control.start, or since reset_peak_memory_stats."""
    return _meter(device).peak


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Reset max_memory_allocated to the memory that is allocated now."""
    _meter(device).reset_peak()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes of the device."""
    meter = _meter(device)
    return meter.free, meter.capacity


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """The bytes of tensors, by the names of torch.cuda.memory_stats; reserved are equal."""
    meter = _meter(device)
    nbytes = {"current": meter.allocated, "peak": meter.peak}
    return {
        f"{name}.all.{key}": value
        for name in ("allocated_bytes", "reserved_bytes")
        for key, value in nbytes.items()
    }


def empty_cache() -> None:
    """Does nothing: no freed memory is kept for devices by this name."""


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """The device's properties, with the names that torch.cuda gives them."""
    return properties_of(_meter(device))


def get_device_name(device: DeviceLike = None) -> str:
    """The preset's name, marked as virtual: "V100-16GB (virtual)"."""
    return get_device_properties(device).name


def synchronize(device: DeviceLike = None) -> None:
    """On the simulated clock, the host waits until the device has done all its work.

    Does nothing after stop(): the device type stays registered, so torch's profiler calls
    this function for the rest of the process.
    """
    if _machine.running() is None:
        return
    meter = _meter(device)
    meter.check_assert()
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
