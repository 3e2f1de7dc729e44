"""The report as one HTML file that opens anywhere: lanes to zoom, memory over time, text."""

import json
from collections import defaultdict
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from multigpu.virtual.record import LIMIT, Lifetime
from multigpu.virtual.sim.contents import (
    ACTIVATIONS,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATE,
    TEMPORARIES,
    WORKSPACES,
)
from multigpu.virtual.sim.timeline import Timeline

TEMPLATE = Path(__file__).with_name("page.html")
# The columns of an event; times are whole nanoseconds.
LOOKS = ("forward", "backward", "update", "transfer", "collective")
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, TEMPORARIES, WORKSPACES, OTHER)
# Points of a memory curve: a screen has fewer columns.
MOST_POINTS = 4000


def html(
    command: str,
    text: str,
    timeline: Timeline,
    memory: dict[str, list[Lifetime]],
    capacities: dict[str, int],
) -> str:
    """The page of a run, or of the part of it between the timeline's start and its end.

    `text` is the report for people, `memory` the allocations and `capacities` the bytes of
    each lane. Events outside are left out; time begins with the timeline's start.
    """
    data = {
        "label": timeline.label,
        "end": _nanoseconds(timeline.end - timeline.start),
        "lanes": timeline.lanes,
        "most": LIMIT,
        "looks": LOOKS,
        "kinds": KINDS,
        "events": _events(timeline),
        "memory": [_curve(memory.get(lane, [])) for lane in timeline.lanes],
        "capacities": [capacities.get(lane, 0) for lane in timeline.lanes],
    }
    # "</script>" in a name would end the script.
    encoded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, value in {"COMMAND": escape(command), "TEXT": escape(text)}.items():
        page = page.replace(f"<!--{name}-->", value)
    return page.replace('"DATA"', encoded)


def _events(timeline: Timeline) -> dict[str, list[Any]]:
    """The events as columns: a transfer is in the lanes of both its ends."""
    names: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("lane", "look", "name", "stream", "start", "length")
    }
    for event in timeline.events:
        look = event.phase if event.kind == "compute" else event.kind
        note = timeline.notes.get(event, "")
        shape = "" if event.shape is None else f" {list(event.shape)}"
        name = f"{event.name}{shape}: {note}" if note else f"{event.name}{shape}"
        ends = [event.device]
        if event.kind == "transfer" and event.peer is not None and event.peer >= 0:
            ends.append(event.peer)
        start = _nanoseconds(event.start - timeline.start)
        for lane in ends:
            row = (
                lane,
                LOOKS.index(look),
                names.setdefault(name, len(names)),
                event.stream,
                start,
                _nanoseconds(event.end - timeline.start) - start,
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    return columns | {"names": list(names)}


def _curve(lifetimes: list[Lifetime]) -> dict[str, list[Any]]:
    """Bytes of each kind over time: `times`, and for each kind a list of as many bytes.

    Of more than MOST_POINTS changes, those of an equal number that follow each other are one
    point: that with the most bytes.
    """
    changes: dict[int, list[int]] = defaultdict(lambda: [0] * len(KINDS))
    for start, end, nbytes, kind in lifetimes:
        changes[_nanoseconds(start)][KINDS.index(kind)] += nbytes
        changes[_nanoseconds(end)][KINDS.index(kind)] -= nbytes
    times = sorted(changes)
    columns = [
        list(accumulate(changes[time][kind] for time in times)) for kind in range(len(KINDS))
    ]
    totals = [sum(column[i] for column in columns) for i in range(len(times))]
    part = -(-len(times) // MOST_POINTS) or 1
    chosen = [
        max(range(first, min(first + part, len(times))), key=totals.__getitem__)
        for first in range(0, len(times), part)
    ]
    return {
        "times": [times[i] for i in chosen],
        "bytes": [[column[i] for i in chosen] for column in columns],
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
