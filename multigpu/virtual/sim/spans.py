"""Spans of simulated time, and durations as text."""

from collections.abc import Iterable

from multigpu.virtual.sim.event import Event

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
Span = tuple[float, float]


def involves(event: Event, index: int) -> bool:
    """Whether the event is work of the device; a transfer is work of both its ends."""
    return event.device == index or (event.kind == "transfer" and event.peer == index)


def merge_spans(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The union of spans within [start, end], as disjoint spans in order."""
    union: list[Span] = []
    for begin, stop in sorted((max(s, start), min(t, end)) for s, t in spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        elif stop > begin:
            union.append((begin, stop))
    return union


def subtract_spans(spans: list[Span], holes: list[Span]) -> list[Span]:
    """The spans without the holes. Both lists are disjoint and in order, as in merge_spans."""
    rest: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        index = first
        while index < len(holes) and holes[index][0] < end:
            hole_start, hole_end = holes[index]
            if hole_start > start:
                rest.append((start, hole_start))
            start = max(start, hole_end)
            index += 1
        if start < end:
            rest.append((start, end))
    return rest


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit for a duration (s, ms or µs), as (seconds per unit, the unit's name)."""
    return next(((scale, unit) for scale, unit in UNITS if seconds >= scale), UNITS[-1])


def format_seconds(seconds: float) -> str:
    """A duration with two decimals and a unit: "12.34 ms"."""
    scale, unit = unit_of(seconds)
    return f"{seconds / scale:.2f} {unit}"
