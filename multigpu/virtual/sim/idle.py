"""Why a device does not compute: transfers, bubbles of a pipeline, launch overhead.

transfer  A transfer or a collective of the device runs, and the device does not compute.
bubble    The device waits for another device, and some other device works. Before a transfer
          or a collective it waits until the work of the other end is done; after its last work
          it waits until the end of the timeline.
launch    The rest: the next operation has not been launched, because the host needs time for
          each launch, or because it waits for something else.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from multigpu.virtual.sim.event import HOST, Event
from multigpu.virtual.sim.spans import Span, involves, merge_spans, subtract_spans, work_spans

if TYPE_CHECKING:
    from multigpu.virtual.sim.timeline import Timeline

REASONS = ("transfer", "bubble", "launch")


def idle_spans(timeline: "Timeline", lane: int) -> dict[str, list[Span]]:
    """The spans in which a device does not compute, by reason.

    {"transfer": …, "bubble": …, "launch": …}, each a list of disjoint spans in order. They and
    the spans in which the device computes fill the timeline.
    """
    limits = (timeline.start, timeline.end)
    lanes = range(len(timeline.lanes))
    work = {i: [event for event in timeline.events if involves(event, i)] for i in lanes}
    computing, communicating = work_spans(work[lane], lane, *limits)
    transfers = subtract_spans(communicating, computing)
    others = [(e.start, e.end) for i in lanes if i != lane for e in work[i]]
    others = merge_spans(others, *limits)
    ends = {i: sorted(event.end for event in work[i]) for i in lanes}
    by_start: dict[float, list[Event]] = defaultdict(list)
    for event in work[lane]:
        by_start[event.start].append(event)
    starts = sorted(by_start)
    shared = _lanes_of_messages(timeline)

    def others_done(at: float) -> float:
        """When the other devices of the transfers that start at `at` had done their work."""
        done = [-inf]
        for event in by_start.get(at, ()):
            for other in _others(event, lane, shared):
                # Without the transfer itself, which ends at `at` if it takes no time.
                is_instant = event.end == event.start
                earlier = bisect_right(ends[other], at) - (1 if is_instant else 0)
                if earlier:
                    done.append(ends[other][earlier - 1])
        return max(done)

    waits: list[Span] = []
    gaps = subtract_spans([limits], merge_spans(computing + transfers, *limits))
    for gap in gaps:
        # With a free link a transfer takes no time: it divides a gap without filling it.
        inside = starts[bisect_right(starts, gap[0]) : bisect_left(starts, gap[1])]
        for start, end in pairwise([gap[0], *inside, gap[1]]):
            until = end if end == timeline.end else others_done(end)
            if until > start:
                waits.append((start, until))
    # Where no device works, all of them wait for the host.
    bubbles = subtract_spans(waits, subtract_spans(waits, others))
    launches = subtract_spans(gaps, bubbles)
    return {"transfer": transfers, "bubble": bubbles, "launch": launches}


def _lanes_of_messages(timeline: "Timeline") -> dict[tuple[str, float, float], set[int]]:
    """{(kind, start, end): lanes} of messages and collectives, which name no peer.

    They have the same start and end on all ranks.
    """
    lanes: dict[tuple[str, float, float], set[int]] = defaultdict(set)
    for event in timeline.events:
        if event.kind != "compute" and event.peer is None:
            lanes[event.kind, event.start, event.end].add(event.device)
    return lanes


def _others(
    event: Event, lane: int, shared: dict[tuple[str, float, float], set[int]]
) -> set[int]:
    """The other devices of a transfer or a collective; empty for computation."""
    if event.kind == "compute":
        return set()
    if event.peer is None:
        return shared[event.kind, event.start, event.end] - {lane}
    return {event.device, event.peer} - {lane, HOST}
