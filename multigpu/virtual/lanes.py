"""A timeline as text: a line for each GPU, a character for each part of the time."""

from multigpu.virtual.sim.spans import (
    Span,
    format_seconds,
    subtract_spans,
    work_spans,
)
from multigpu.virtual.sim.timeline import Timeline

WIDTH = 64
# The share of a part in which the GPU computes, in eighths.
COMPUTES = "▁▂▃▄▅▆▇█"
COMMUNICATES = "~"
IDLE = " "


def text_lanes(timeline: Timeline) -> list[str]:
    """The timeline's lanes as lines of WIDTH characters, with a line that explains them.

    The higher a block, the more the GPU computes in that part of the time. "~" is a part in
    which it communicates more than it computes; communication behind computing is not seen.
    """
    if timeline.end <= timeline.start:
        return []
    longest = max(map(len, timeline.lanes))
    lines = [
        f"{name.ljust(longest)}  |{_line(timeline, lane)}|"
        for lane, name in enumerate(timeline.lanes)
    ]
    if timeline.start:
        part = f"timeline of {format_seconds(timeline.end - timeline.start)}"
    else:
        part = f"timeline until {format_seconds(timeline.end)}"
    return [
        f"{part}: {COMPUTES[1]} to {COMPUTES[-1]} computes, {COMMUNICATES} communicates",
        *lines,
    ]


def _line(timeline: Timeline, lane: int) -> str:
    limits = (timeline.start, timeline.end)
    computing, communicating = work_spans(timeline.events, lane, *limits)
    exposed = subtract_spans(communicating, computing)
    shares = zip(_shares(computing, *limits), _shares(exposed, *limits), strict=True)
    return "".join(_character(*both) for both in shares)


def _character(computes: float, communicates: float) -> str:
    if communicates > computes:
        return COMMUNICATES
    eighths = round(computes * len(COMPUTES))
    return COMPUTES[eighths - 1] if eighths else IDLE


def _shares(spans: list[Span], start: float, end: float) -> list[float]:
    """What share of each of WIDTH equal parts of the time the spans fill."""
    part = (end - start) / WIDTH
    filled = [0.0] * WIDTH
    for first, last in spans:
        at = min(int((first - start) / part), WIDTH - 1)
        while at < WIDTH and start + at * part < last:
            stop = start + (at + 1) * part
            filled[at] += min(last, stop) - max(first, start + at * part)
            at += 1
    return [seconds / part for seconds in filled]
