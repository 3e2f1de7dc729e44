"""`torch.vgpu`: the functions of torch.cuda that programs use, for virtual GPUs.

torch's own code calls these, too: DataParallel, autocast, checkpointing, torch.manual_seed.
"""

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from multigpu.vgpu.sim import machine as _machine
from multigpu.vgpu.sim.memory import Meter, format_bytes

Device = torch.device | str | int | None

# The current streams by the device's index. As in torch, each thread has its own.
_local = threading.local()

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


def set_device(device: Device) -> None:
    """Make a device the current device, which "vgpu" means in this thread.

    A negative index changes nothing, as in torch.cuda.
    """
    index = _index(device)
    if index >= 0:
        _machine.current().meter(torch.device("vgpu", index))
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


def _index(device: Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "vgpu":
        raise ValueError(f"Expected a vgpu device, but got: {device}")
    return current_device() if device.index is None else device.index


def _meter(device: Device) -> Meter:
    return _machine.current().meter(torch.device("vgpu", _index(device)))


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold on the device now.

    Each storage is rounded up to a multiple of 512 bytes, as in CUDA's allocator.
    """
    return _meter(device).allocated


def max_memory_allocated(device: Device = None) -> int:
    """The largest memory_allocated since vgpu.start, or since reset_peak_memory_stats."""
    return _meter(device).peak


def reset_peak_memory_stats(device: Device = None) -> None:
    """Reset max_memory_allocated to the memory that is allocated now."""
    meter = _meter(device)
    meter.peak = meter.allocated


def memory_reserved(device: Device = None) -> int:
    """The same as memory_allocated: a virtual GPU keeps no cache of freed memory."""
    return _meter(device).allocated


max_memory_reserved = max_memory_allocated


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes of the device."""
    meter = _meter(device)
    return meter.capacity - meter.allocated, meter.capacity


def memory_stats(device: Device = None) -> dict[str, int]:
    """The counters of torch.cuda.memory_stats that a virtual GPU has."""
    meter = _meter(device)
    return {
        "allocated_bytes.all.current": meter.allocated,
        "allocated_bytes.all.peak": meter.peak,
    }


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Lines to print: the memory allocated now, its peak, the free memory, the capacity."""
    meter = _meter(device)
    rows = {
        "allocated": meter.allocated,
        "peak": meter.peak,
        "free": meter.capacity - meter.allocated,
        "capacity": meter.capacity,
    }
    lines = [f"{name:<10}{format_bytes(nbytes):>12}" for name, nbytes in rows.items()]
    return "\n".join([f"{meter.device}, {get_device_name(meter.index)}", *lines])


def empty_cache() -> None:
    """Does nothing: a virtual GPU keeps no cache of freed memory."""


def synchronize(device: Device = None) -> None:
    """On the simulated clock, the host waits until the device has done all its work.

    Does nothing after vgpu.stop(): the device type stays registered, so torch's profiler calls
    this function for the rest of the process.
    """
    if _machine.running() is None:
        return
    meter = _meter(device)
    meter.machine.clock.synchronize(meter.index)


def get_device_name(device: Device = None) -> str:
    """The preset's name, marked as virtual: "V100-16GB (virtual)"."""
    return f"{_meter(device).machine.gpu.name} (virtual)"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    """`name` and `total_memory` in bytes."""
    meter = _meter(device)
    return SimpleNamespace(name=get_device_name(meter.index), total_memory=meter.capacity)


def manual_seed(seed: int) -> None:
    """Seed the current device's random numbers."""
    _machine.current().generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed every device's random numbers; torch.manual_seed calls this."""
    running = _machine.running()
    for generator in running.generators if running else ():
        generator.manual_seed(seed)


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The state of the device's random numbers."""
    return _machine.current().generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of the device's random numbers."""
    _machine.current().generators[_index(device)].set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast supports."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the device computes in bfloat16.

    A GPU without bfloat16 units emulates them. As in torch.cuda, emulation counts unless
    including_emulation is False.
    """
    return including_emulation or _machine.current().gpu.bf16


# torch compares streams by their numbers, so they are unique in the process.
# 0 is the device's own stream.
_stream_numbers = itertools.count(1)


class Stream(torch.Stream):
    """A side stream of a device. Copies on it overlap with the computation (sim/clock.py).

    Copies within `with torch.vgpu.stream(side):`, or `with side:`, are on the side stream. All
    other operations stay in order, because each device has one stream for its computation.
    """

    def __new__(cls, device: Device = None) -> "Stream":
        own = torch.Stream(device=torch.device("vgpu", _index(device)))
        return super().__new__(
            cls,
            stream_id=next(_stream_numbers),
            device_index=own.device_index,
            device_type=own.device_type,
        )

    def __enter__(self) -> "Stream":
        # A list, because the same stream can be entered again within its own block.
        self.within = [*getattr(self, "within", ()), stream(self)]
        self.within[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.within.pop().__exit__(*error)


def current_stream(device: Device = None) -> torch.Stream:
    """The device's current stream in this thread; by default the device's own stream."""
    index = _index(device)
    own = torch.Stream(device=torch.device("vgpu", index))
    return getattr(_local, "streams", {}).get(index, own)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """`with torch.vgpu.stream(side):` makes `side` this thread's current stream in the block.

    With None it changes nothing.
    """
    if stream is None:
        yield
        return
    before = getattr(_local, "streams", {})
    _local.streams = {**before, stream.device.index: stream}
    try:
        with _machine.current().clock.on_side_stream(isinstance(stream, Stream)):
            yield
    finally:
        _local.streams = before
