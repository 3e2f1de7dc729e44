"""Where a device's simulated time goes: computing, memory traffic, communication, host."""

from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.spans import merge_spans

CAUSES = ("computing", "memory traffic", "communication", "host")
# Parts of the names of operations whose kernels are products; the others move memory.
PRODUCTS = ("convolution", "mm", "attention")


def causes(events: list[Event], start: float, end: float, device: int = 0) -> dict[str, float]:
    """The seconds of each cause from `start` to `end`; together they are `end - start`.

    A product counts as computing, any other operation as memory traffic. Communication is the
    time in which only collectives or transfers run, and the host's is the time in which
    nothing runs, because the host has not launched it yet.
    """
    own = [event for event in events if event.device == device]
    kernels = [event for event in own if event.kind == "compute"]
    seconds = dict.fromkeys(CAUSES, 0.0)
    for event in kernels:
        is_product = any(part in event.name for part in PRODUCTS)
        cause = "computing" if is_product else "memory traffic"
        seconds[cause] += _covered([event], start, end)
    both = _covered(own, start, end)
    busy = _covered(kernels, start, end)
    seconds["communication"] = both - busy
    seconds["host"] = end - start - both
    return seconds


def _covered(events: list[Event], start: float, end: float) -> float:
    """The seconds between `start` and `end` in which at least one of the events runs."""
    spans = merge_spans(((event.start, event.end) for event in events), start, end)
    return sum(stop - begin for begin, stop in spans)


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each cause's share of the time, rounded to two digits."""
    total = sum(seconds.values())
    return {cause: round(value / total, 2) for cause, value in seconds.items()}
