"""How long something takes on a GPU and on its virtual GPU: whole steps, kernels alone.

On a GPU, times are read from CUDA events, after a warm-up. In a rehearsal, in which the CPU
has the GPU's place, they are read from the clock.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles

import torch
from section import Section, main
from workloads import computing, simulating

from multigpu.virtual import control

Call = Callable[[], object]
# CUDA's queue has room for about a thousand launches; a host that fills it has to wait.
LAUNCHES = 600


def spread(seconds: list[float]) -> dict[str, float]:
    """The median and the quartiles of repeats, in seconds, and the number of repeats."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "repeats": len(seconds)}


def host_seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def event_times(call: Call, repeats: int) -> dict[str, float]:
    """The times from the end of one call to the end of the next, on the GPU."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return spread([before.elapsed_time(after) / 1e3 for before, after in pairwise(events)])


def warm_up(call: Call) -> tuple[float, float]:
    """Call four times; the seconds of the last call: the host's, and until the GPU is done."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    launched = host_seconds(call)
    torch.cuda.synchronize()
    return launched, time.perf_counter() - began


def step_times(call: Call, device: torch.device) -> dict[str, float]:
    """Seconds of a step, with the host running ahead, as in training.

    A step takes the longer of the host's time for its launches and the GPU's time. There are 5
    to 50 repeats: as many as fit into a second.
    """
    if device.type == "cpu":
        return spread([host_seconds(call) for _ in range(2)])
    _, pilot = warm_up(call)
    return event_times(call, max(5, min(50, int(1 / pilot))))


def kernel_times(call: Call, device: torch.device) -> dict[str, float]:
    """The GPU's seconds for one call, without the host's: its kernels one after the other.

    The calls wait in the queue behind a kernel that only waits, until the host has launched
    all of them. The operands are warm in the L2 cache.
    """
    if device.type == "cpu":
        return spread([host_seconds(call) for _ in range(2)])
    launched, pilot = warm_up(call)
    # A call that takes long is a repeat; otherwise five are. A backward has up to six kernels.
    inner = 1 if pilot > 2e-3 else 5
    repeats = max(5, min(20, int(0.1 / (inner * pilot)), LAUNCHES // (6 * inner + 1)))
    # The host needs this long for all launches; half as much again, and 1 ms, to be safe.
    wait = 1e-3 + 1.5 * repeats * (inner * launched + 10e-6)
    # It takes clock cycles and is not documented; torch's own tests of streams use it.
    torch.cuda._sleep(int(wait * torch.cuda.get_device_properties(0).clock_rate * 1e3))
    found = event_times(lambda: [call() for _ in range(inner)], repeats)
    return {name: one if name == "repeats" else one / inner for name, one in found.items()}


def simulated_step(call: Call) -> float:
    """Simulated seconds of a step on the running virtual GPU, after one step to warm up."""
    call()
    began = control.elapsed()
    for _ in range(2):
        call()
    return (control.elapsed() - began) / 2


def simulated_kernels(call: Call) -> float:
    """Simulated seconds of a call's kernels on the running virtual GPU, without the host's."""
    call()
    began = control.elapsed()
    call()
    events = control.timeline(since=began).events
    return sum(event.end - event.start for event in events if event.kind == "compute")


@dataclass(frozen=True)
class Case:
    """What is timed: `calls` makes, on a device, the calls of this case by their names."""

    name: str
    kind: str
    precision: str
    calls: Callable[[torch.device], dict[str, Call]]


def compare(
    says: str,
    unit: str,
    cases: Callable[[Section], Iterator[Case]],
    measure: Callable[[Call, torch.device], dict[str, float]],
    simulate: Callable[[Call], float],
) -> None:
    """Run a section that measures its cases on the GPU, and simulates them."""

    def real(section: Section) -> None:
        simulated = section.virtual()
        for case in cases(section):
            with section.item(case.name), computing(case.precision):
                calls = case.calls(section.device)
                for part in list(calls):
                    name = f"{case.name} {part}".strip()
                    # The call's tensors are freed before the next case.
                    times = measure(calls.pop(part), section.device)
                    found = simulated.get(name, {}).get("seconds")
                    section.row(
                        case=name,
                        kind=f"{case.kind} {case.precision}",
                        measured=times,
                        simulated=found,
                        error=found and found / times["median"] - 1,
                    )

    def virtual(section: Section) -> None:
        for case in cases(section):
            with (
                section.item(case.name),
                simulating(case.precision, section.gpu) as device,
                computing(case.precision),
            ):
                for part, call in case.calls(device).items():
                    name = f"{case.name} {part}".strip()
                    section.row(case=name, seconds=simulate(call))

    units = {"measured": unit, "simulated": unit, "error": "%"}
    main(says, units, real, virtual)
