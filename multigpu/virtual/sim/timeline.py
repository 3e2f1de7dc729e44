"""The clock's events as fractions of busy time, as a picture and as a trace file.

All times are simulated, in seconds since control.start. Pictures and traces have a label that
marks the times as simulated and names the machine.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError, pluralize
from multigpu.files import atomic
from multigpu.virtual.sim import timeline_picture
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.idle import REASONS, idle_spans
from multigpu.virtual.sim.spans import (
    Span,
    format_seconds,
    involves,
    merge_spans,
    subtract_spans,
    work_spans,
)
from multigpu.virtual.sim.streams import DEFAULT

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Timeline:
    """The events of a machine between two simulated times.

    `events` are sorted by start, then by device. `lanes` are the devices' names, by index.
    `start` and `end` are in seconds. `label` names the simulated machine. `notes` are texts
    about events: what a transfer carries, and the number of a computation's micro-batch.
    """

    def __init__(
        self,
        events: Iterable[Event],
        lanes: list[str],
        start: float,
        end: float,
        label: str,
        notes: Mapping[Event, str] | None = None,
    ):
        self.lanes = lanes
        self.start = start
        self.end = end
        self.label = label
        self.notes = dict(notes or {})
        inside = (event for event in events if event.end > start and event.start < end)
        self.events = sorted(inside, key=lambda event: (event.start, event.device, event.end))

    @classmethod
    def of_ranks(cls, ranks: "list[Timeline]") -> "Timeline":
        """Join the timelines of a run's ranks; each device that a rank uses has a lane.

        Each rank's clock starts with its virtual GPUs. Because collectives exchange the ranks'
        times, the times can be compared. If all ranks see the same GPUs, as with CUDA, each
        has lanes for those that it uses alone. In the result, an event's `device` is the
        number of its lane. The result spans from the first start to the last end.
        """
        used = [sorted({event.device for event in timeline.events}) for timeline in ranks]
        numbers = [device for devices in used for device in devices]
        shared = len(ranks) > 1 and all(
            0 < len(devices) < len(timeline.lanes)
            for devices, timeline in zip(used, ranks, strict=True)
        )
        shared = shared and len(numbers) == len(set(numbers))
        if not shared:
            used = [list(range(len(timeline.lanes))) for timeline in ranks]
        events: list[Event] = []
        notes: dict[Event, str] = {}
        lanes: list[str] = []
        for rank, (devices, timeline) in enumerate(zip(used, ranks, strict=True)):
            place = {device: len(lanes) + i for i, device in enumerate(devices)}
            for event in timeline.events:
                on_device = event.peer is not None and event.peer >= 0
                peer = place.get(event.peer, event.peer) if on_device else event.peer
                moved = event._replace(device=place[event.device], peer=peer)
                events.append(moved)
                if event in timeline.notes:
                    notes[moved] = timeline.notes[event]
            if len(devices) == 1:
                lanes.append(f"rank {rank}")
            else:
                lanes += [f"rank {rank}, {timeline.lanes[device]}" for device in devices]
        labels = (timeline.label.removeprefix("simulated: ") for timeline in ranks)
        machines = " or ".join(dict.fromkeys(labels))
        where = " on" if shared else ", each"
        return cls(
            events,
            lanes,
            start=min(timeline.start for timeline in ranks),
            end=max(timeline.end for timeline in ranks),
            label=f"simulated: {pluralize(len(ranks), 'rank')}{where} {machines}",
            notes=notes,
        )

    def __repr__(self) -> str:
        busy = ", ".join(
            f"{lane} busy {self.busy(i):.0%}" for i, lane in enumerate(self.lanes)
        )
        duration = format_seconds(self.end - self.start)
        return f"<{len(self.events)} events in {duration}; {busy}; {self.label}>"

    def _repr_html_(self) -> str:
        """In a notebook: the events, to zoom with the mouse and the keyboard."""
        from multigpu.virtual import page

        document = page.html("multigpu.timeline()", repr(self), self, {}, {})
        height = 300 + 50 * len(self.lanes)
        return (
            f'<iframe srcdoc="{escape(document)}" '
            f'style="width: 100%; height: {height}px; border: 0"></iframe>'
        )

    def busy(self, device: "torch.device | str | int", kind: str | None = "compute") -> float:
        """The fraction of the time, 0 to 1, in which the device did work of `kind`.

        kind is "compute", "transfer" or "collective". None counts all kinds, so
        1 − busy(device, None) is the fraction without any work. Raises UserError for an
        unknown device.
        """
        index = self._index(device)
        spans = [
            (event.start, event.end)
            for event in self.events
            if involves(event, index) and kind in (None, event.kind)
        ]
        return self._fraction(merge_spans(spans, self.start, self.end))

    def idle(self, device: "torch.device | str | int") -> float:
        """The fraction of the time, 0 to 1, in which the device did not compute."""
        return 1 - self.busy(device)

    def overlap(self, device: "torch.device | str | int") -> float:
        """The fraction of the time, 0 to 1, in which a device computes and communicates.

        Communication is a transfer or a collective. breakdown() counts this time as
        computation, because the communication costs no time there.
        """
        index = self._index(device)
        computing, communicating = work_spans(self.events, index, self.start, self.end)
        exposed = subtract_spans(communicating, computing)
        return self._fraction(subtract_spans(communicating, exposed))

    def breakdown(self, device: "torch.device | str | int") -> dict[str, float]:
        """What the device's time is used for, as fractions of the time, which add up to 1.

        {"compute": …, "transfer": …, "bubble": …, "launch": …}: idle.py defines the reasons
        for which a device does not compute. A transfer that overlaps with computation counts
        as computation. Raises UserError for an unknown device.
        """
        fractions = {"compute": self.busy(device)}
        spans = idle_spans(self, self._index(device))
        return fractions | {reason: self._fraction(spans[reason]) for reason in REASONS}

    def plot(
        self,
        target: "str | Path | Axes | None" = None,
        title: str | None = None,
        contents: Callable[[Event], str] | None = None,
        until: float | None = None,
        shares: bool = True,
    ) -> "Figure | Path":
        """Draw a lane for each device: computation, bubbles, transfers and collectives.

        target    a file (.png, .svg, .pdf) to write, the axes to draw into, or None for a new
                  figure, which a notebook displays
        contents  returns what a transfer or a collective carries, or "" if it does not know;
                  without it the notes are used, and collectives in backward carry gradients
        until     the seconds that the time axis shows; give several pictures the same number
        shares    write at the right which share of the time each device computes

        Numbers in the boxes are micro-batches. Returns the path, or the figure.
        """
        return timeline_picture.plot(self, target, title, contents, until, shares)

    def chrome_trace(self, path: str | Path) -> Path:
        """Write a trace file for chrome://tracing and ui.perfetto.dev, and return its path.

        In the file each device is a process, and each kind of event is a row; a side stream
        has rows of its own. Times are in microseconds, as the format requires (Google, "Trace
        Event Format").
        """
        rows: list[dict[str, Any]] = []
        for index, lane in enumerate(self.lanes):
            name = {"name": f"{lane} ({self.label})"}
            rows.append({"ph": "M", "pid": index, "name": "process_name", "args": name})
        for event in self.events:
            row = {
                "ph": "X",
                "pid": event.device,
                "tid": _row(event),
                "cat": event.phase or event.kind,
                "name": event.name,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
            }
            if event.shape is not None:
                row["args"] = {"shape": event.shape}
            rows.append(row)
        trace = {"traceEvents": rows, "otherData": {"label": self.label}}
        with atomic(path) as temporary:
            temporary.write_text(json.dumps(trace))
        return Path(path)

    def _fraction(self, spans: list[Span]) -> float:
        """The fraction of the time that disjoint spans fill; 0.0 if there is no time."""
        duration = self.end - self.start
        return sum(end - start for start, end in spans) / duration if duration > 0 else 0.0

    def _index(self, device: "torch.device | str | int") -> int:
        """The lane of a device. Raises UserError if the timeline has none for it."""
        if isinstance(device, int):
            index = device
        else:
            number = str(device).partition(":")[2]
            index = int(number) if number.isdecimal() else None
        if index is None or not 0 <= index < len(self.lanes):
            raise UserError(
                f"{device} is not in this timeline: its lanes are {', '.join(self.lanes)}."
            )
        return index


def _row(event: Event) -> str:
    """The row of a trace file in which the event is drawn."""
    if event.stream == DEFAULT or event.kind == "collective":
        return event.kind
    return f"{event.kind}, stream {event.stream}"
