"""Why a device does not compute: transfers, bubbles of a pipeline, launch overhead.

transfer  A transfer or a collective of the device runs, and the device does not compute.
bubble    The device waits for another device, and some other device works. It waits until the
          transfer or the collective whose start was delayed by the other device's work, or
          until the end of the timeline.
launch    The rest: the next operation has not been launched, because the host needs time for
          each launch, or because it waits for something else.
"""

from typing import TYPE_CHECKING

from multigpu.vgpu.sim.clock import Event
from multigpu.vgpu.sim.spans import Span, involves, merge_spans, subtract_spans

if TYPE_CHECKING:
    from multigpu.vgpu.sim.timeline import Timeline

REASONS = ("transfer", "bubble", "launch")


def idle_spans(timeline: "Timeline", lane: int) -> dict[str, list[Span]]:
    """The spans in which a device does not compute, by reason.

    {"transfer": …, "bubble": …, "launch": …}, each a list of disjoint spans in order. With the
    spans of the device's computation they fill the timeline.
    """
    limits = (timeline.start, timeline.end)
    lanes = range(len(timeline.lanes))
    work = {i: [event for event in timeline.events if involves(event, i)] for i in lanes}
    computing = [(e.start, e.end) for e in work[lane] if e.kind == "compute"]
    computing = merge_spans(computing, *limits)
    communicating = [(e.start, e.end) for e in work[lane] if e.kind != "compute"]
    transfers = subtract_spans(merge_spans(communicating, *limits), computing)
    others = [(e.start, e.end) for i in lanes if i != lane for e in work[i]]
    others = merge_spans(others, *limits)
    ends = {i: {event.end for event in work[i]} for i in lanes}

    waits: list[Span] = []
    gaps = subtract_spans([limits], merge_spans(computing + transfers, *limits))
    for gap in gaps:
        # With a free link a transfer takes no time: it divides a gap without filling it.
        starts = {event.start for event in work[lane] if gap[0] < event.start < gap[1]}
        points = [gap[0], *sorted(starts), gap[1]]
        for start, end in zip(points, points[1:], strict=False):
            delayed = (
                end in ends[other]
                for event in work[lane]
                if event.start == end
                for other in _partners(timeline, event, lane)
            )
            if end == timeline.end or any(delayed):
                waits.append((start, end))
    # Where no device works, all of them wait for the host.
    bubbles = subtract_spans(waits, subtract_spans(waits, others))
    launches = subtract_spans(gaps, bubbles)
    return {"transfer": transfers, "bubble": bubbles, "launch": launches}


def _partners(timeline: "Timeline", event: Event, lane: int) -> list[int]:
    """The other devices of a transfer or a collective.

    The events of a message or a collective have the same start and end on all ranks.
    """
    if event.kind == "compute":
        return []
    if event.peer is not None:
        return [i for i in (event.device, event.peer) if i not in (lane, -1)]
    return [
        other.device
        for other in timeline.events
        if other.kind == event.kind
        and other.device != lane
        and (other.start, other.end) == (event.start, event.end)
    ]
