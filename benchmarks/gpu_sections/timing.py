"""How long something takes: whole steps, and kernels alone, with warm-up, repeats and spread.

On a GPU, times are read from CUDA events. In a rehearsal, in which the CPU has the GPU's
place, they are read from the clock.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import quantiles

import torch

from multigpu.virtual import control

WARM_UP = 3
REHEARSED = 2  # repeats on the CPU
# CUDA's queue has room for about a thousand launches; a host that fills it has to wait.
LAUNCHES = 600
# A call of this many seconds is long enough for an event of its own.
LONG = 2e-3


@dataclass(frozen=True)
class Times:
    """Seconds of one repeat (median, lower and upper quartile), and the number of repeats."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Times":
        if len(seconds) < 2:
            return cls(seconds[0], seconds[0], seconds[0], len(seconds))
        low, middle, high = quantiles(seconds, n=4, method="inclusive")
        return cls(middle, low, high, len(seconds))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def step_times(
    step: Callable[[], object], device: torch.device, budget: float = 1.0, limit: int = 50
) -> Times:
    """The times from the end of one step to the end of the next, with the host running ahead.

    There are 5 to `limit` repeats: as many as fit into `budget` seconds. So a step takes the
    longer of the host's time for its launches and the GPU's time, as in training.
    """
    if device.type == "cpu":
        return Times.of([_seconds_on_host(step) for _ in range(REHEARSED)])
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    pilot = time.perf_counter() - began
    repeats = max(5, min(limit, int(budget / max(pilot, 1e-9))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronize(device)
    ends = pairwise(events)
    return Times.of([before.elapsed_time(after) / 1e3 for before, after in ends])


def kernel_times(
    call: Callable[[], object], device: torch.device, budget: float = 0.15, inner: int = 5
) -> Times:
    """The device's time for one call, without the host's: its kernels one after the other.

    The calls wait in the queue behind a kernel that only waits, until the host has launched
    all of them. A repeat is `inner` calls. The operands are warm in the L2 cache.
    """
    if device.type == "cpu":
        return Times.of([_seconds_on_host(call) for _ in range(REHEARSED)])
    for _ in range(WARM_UP):
        call()
    synchronize(device)
    began = time.perf_counter()
    call()
    launched = time.perf_counter() - began
    synchronize(device)
    pilot = time.perf_counter() - began
    if pilot > LONG:
        inner = 1
    repeats = int(budget / max(inner * pilot, 1e-9))
    # A call has at most six kernels (a backward), and an event is a launch, too.
    repeats = max(5, min(20, repeats, LAUNCHES // (6 * inner + 1)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    # The host needs this long for all launches; half as much again, and 1 ms, to be safe.
    wait_on_gpu(1e-3 + 1.5 * repeats * (inner * launched + 10e-6))
    events[0].record()
    for event in events[1:]:
        for _ in range(inner):
            call()
        event.record()
    synchronize(device)
    ends = pairwise(events)
    return Times.of([before.elapsed_time(after) / 1e3 / inner for before, after in ends])


def wait_on_gpu(seconds: float) -> None:
    """Launch a kernel that does nothing for about this long.

    torch.cuda._sleep is not documented; torch's own tests of streams use it. It takes a number
    of clock cycles. The clock rate is in kHz.
    """
    clock = torch.cuda.get_device_properties(0).clock_rate * 1e3
    torch.cuda._sleep(int(seconds * clock))


def simulated_step(step: Callable[[], object], steps: int = 2) -> float:
    """Simulated seconds of a step on the running virtual GPU, after one step to warm up."""
    step()
    began = control.elapsed()
    for _ in range(steps):
        step()
    return (control.elapsed() - began) / steps


def simulated_kernels(call: Callable[[], object]) -> float:
    """Simulated seconds of a call's kernels on the running virtual GPU, without the host's."""
    call()
    began = control.elapsed()
    call()
    events = control.timeline(since=began).events
    return sum(event.end - event.start for event in events if event.kind == "compute")


def _seconds_on_host(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
