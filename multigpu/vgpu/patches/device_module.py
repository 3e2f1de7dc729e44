"""What does `torch.vgpu` offer? What torch.cuda does, as far as programs ask for it: memory, current device, seeds.

Torch's own code calls these too: DataParallel, autocast, checkpointing, torch.manual_seed.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from multigpu.vgpu.sim import machine as _machine
from multigpu.vgpu.sim.memory import Meter, readable

_local = threading.local()
Device = torch.device | str | int | None
_initialized = (
    True  # torch.utils.checkpoint saves the random numbers of devices whose module says so
)


def is_available() -> bool:
    """Are virtual GPUs running in this process?"""
    return _machine.running() is not None


def is_initialized() -> bool:
    return is_available()


def _is_in_bad_fork() -> bool:
    import os

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
    """Make a device the one that "vgpu" means in this thread. A negative index changes nothing, as in torch.cuda."""
    index = _index(device)
    if index >= 0:
        _machine.current().meter(torch.device("vgpu", index))
        _machine.set_current_index(index)


@contextmanager
def device(device: Device) -> Iterator[None]:
    """`with torch.vgpu.device(1):` makes it the current device for a while."""
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
    """Bytes that tensors hold on the device now, each storage rounded up to 512 bytes as CUDA's allocator does."""
    return _meter(device).allocated


def max_memory_allocated(device: Device = None) -> int:
    """The largest memory_allocated since the start, or since reset_peak_memory_stats."""
    return _meter(device).peak


def reset_peak_memory_stats(device: Device = None) -> None:
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
    """The meter in a few lines to print: held now, at the peak, free, capacity."""
    meter = _meter(device)
    rows = {
        "allocated": meter.allocated,
        "peak": meter.peak,
        "free": meter.capacity - meter.allocated,
    }
    rows["capacity"] = meter.capacity
    lines = [f"{name:<10}{readable(nbytes):>12}" for name, nbytes in rows.items()]
    return "\n".join([f"{meter.device}, {get_device_name(meter.index)}", *lines])


def empty_cache() -> None:
    """Nothing to do: freed memory is given back at once."""


def synchronize(device: Device = None) -> None:
    """The host waits, on the simulated clock, until the device has done all its work."""
    meter = _meter(device)
    meter.machine.clock.synchronize(meter.index)


def get_device_name(device: Device = None) -> str:
    return f"{_meter(device).machine.gpu.name} (virtual)"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    """The name and the total memory in bytes."""
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
    return _machine.current().generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    _machine.current().generators[_index(device)].set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast may use."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Has the simulated GPU bfloat16 units? Without them it computes in bfloat16 all the same, as torch.cuda says, too."""
    return including_emulation or _machine.current().gpu.bf16


_stream_numbers = itertools.count(1)


class Stream(torch.Stream):
    """A side stream of a device: within `with torch.vgpu.stream(side):`, or `with side:`, copies run beside the computation (clock.py).

    Each device has one stream for its computation, so all else stays in order there.
    """

    def __new__(cls, device: Device = None) -> "Stream":
        own = torch.Stream(
            device=torch.device("vgpu", _index(device))
        )  # its number is 0, as the computation's
        number = next(_stream_numbers)
        return super().__new__(
            cls, stream_id=number, device_index=own.device_index, device_type=own.device_type
        )

    def __enter__(self) -> "Stream":
        self.within = [*getattr(self, "within", ()), stream(self)]
        self.within[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.within.pop().__exit__(*error)


def current_stream(device: Device = None) -> torch.Stream:
    """The device's own stream, or the one that `stream` has made current in this thread."""
    index = _index(device)
    return getattr(_local, "streams", {}).get(index) or torch.Stream(
        device=torch.device("vgpu", index)
    )


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """`with torch.vgpu.stream(torch.vgpu.Stream()):` makes it the current one in this thread; None changes nothing."""
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
