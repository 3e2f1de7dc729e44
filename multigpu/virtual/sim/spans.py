"""Spans of simulated time, and durations as text."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial

import numpy as np

from multigpu.virtual.sim.event import Event

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
Span = tuple[float, float]


def involves(event: Event, index: int) -> bool:
    """Whether the event is work of the device; a transfer is work of both its ends."""
    return event.device == index or (event.kind == "transfer" and event.peer == index)


def work_spans(
    events: Iterable[Event], index: int, start: float, end: float
) -> tuple[list[Span], list[Span]]:
    """(when the device computes, when it communicates) within [start, end].

    Communication is a transfer or a collective. The spans are those of merge_spans.
    """
    work = [event for event in events if involves(event, index)]
    computing = [(event.start, event.end) for event in work if event.kind == "compute"]
    communicating = [(event.start, event.end) for event in work if event.kind != "compute"]
    return merge_spans(computing, start, end), merge_spans(communicating, start, end)


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


def in_turns(works: list[dict[Hashable, list[Span]]]) -> list[Callable[[float], float]]:
    """When users of shared hardware get on with their work: of k at once, each at 1/k speed.

    `works` has each user's disjoint spans of work as if it were alone, by the hardware.
    Returns for each user the function from its time alone to the time with the others.
    """
    left = [
        sorted([(at, name) for name in work for span in work[name] for at in span])[::-1]
        for work in works
    ]
    # (time alone, time with the others); in between a user goes on evenly.
    points = [[(0.0, 0.0)] for _ in works]
    busy: list[set[Hashable]] = [set() for _ in works]
    while users := [user for user, ends in enumerate(left) if ends]:
        count = Counter(name for names in busy for name in names)
        slower = [max((count[name] for name in names), default=1) for names in busy]
        wait, first = min(
            ((left[user][-1][0] - points[user][-1][0]) * slower[user], user) for user in users
        )
        for user in users:
            alone, now = points[user][-1]
            points[user].append((alone + wait / slower[user], now + wait))
        busy[first] ^= {left[first].pop()[1]}
    return [partial(_moved, *np.array(list(zip(*curve, strict=True)))) for curve in points]


def _moved(alone: np.ndarray, turns: np.ndarray, time: float) -> float:
    """The time with the others of a time alone; after the last point it goes on as alone."""
    return float(np.interp(time, alone, turns) + max(time - alone[-1], 0.0))


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit for a duration (s, ms or µs), as (seconds per unit, the unit's name)."""
    return next(((scale, unit) for scale, unit in UNITS if seconds >= scale), UNITS[-1])


def format_seconds(seconds: float) -> str:
    """A duration with two decimals and a unit: "12.34 ms"."""
    scale, unit = unit_of(seconds)
    return f"{seconds / scale:.2f} {unit}"
