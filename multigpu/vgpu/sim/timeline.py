"""What did each device do, and when was it idle? The clock's events as a picture, as fractions, and as a trace file.

All times are simulated, in seconds since vgpu.start; pictures and traces say so, and for which machine.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multigpu.errors import UserError, pluralize
from multigpu.files import atomic
from multigpu.plots import COLLECTIVE, COMPUTE, IDLE, TRANSFER, UPDATE, figure, save
from multigpu.vgpu.sim.clock import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKWARD = (
    "#56B4E9"  # the palette's light blue: computing, as forward, and told apart by lightness
)
# What a bar is called, its colour, and where it lies in a device's lane: height and position in a lane of height 1.
STYLES = {
    "forward": (COMPUTE, 0.5, 0.15),
    "backward": (BACKWARD, 0.5, 0.15),
    "update": (UPDATE, 0.5, 0.15),
    "transfer": (TRANSFER, 0.13, 0.7),
    "collective": (COLLECTIVE, 0.13, 0.83),
}
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Timeline:
    """The events of a machine between two simulated times.

    `events` are sorted by start, then by device. `lanes` are the devices' names, by index. `label` says that the times
    are simulated, and on what.
    """

    def __init__(
        self, events: Iterable[Event], lanes: list[str], start: float, end: float, label: str
    ):
        self.lanes, self.start, self.end, self.label = lanes, start, end, label
        inside = (event for event in events if event.end > start and event.start < end)
        self.events = sorted(inside, key=lambda event: (event.start, event.device, event.end))

    @classmethod
    def of_ranks(cls, ranks: "list[Timeline]") -> "Timeline":
        """The timelines of a run's ranks as one, a lane a rank (a device of a rank, where it has several).

        Each rank's clock starts with vgpu.start, and collectives tell the ranks each other's times, so that the times can
        be compared. Devices are then given by the lane's number. It spans from the first start to the last end.
        """
        events: list[Event] = []
        lanes: list[str] = []
        for rank, one in enumerate(ranks):
            shift = len(lanes)
            for event in one.events:
                peer = (
                    event.peer if event.peer is None or event.peer < 0 else event.peer + shift
                )
                events.append(event._replace(device=event.device + shift, peer=peer))
            lanes += [
                f"rank {rank}" if len(one.lanes) == 1 else f"rank {rank}, {lane}"
                for lane in one.lanes
            ]
        machines = list(dict.fromkeys(one.label.removeprefix("simulated: ") for one in ranks))
        label = f"simulated: {pluralize(len(ranks), 'rank')}, each {' or '.join(machines)}"
        return cls(
            events,
            lanes,
            min(one.start for one in ranks),
            max(one.end for one in ranks),
            label,
        )

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{lane} busy {self.busy(index):.0%}" for index, lane in enumerate(self.lanes)
        )
        return f"<{len(self.events)} events in {readable(self.end - self.start)}; {shares}; {self.label}>"

    def busy(self, device: torch.device | str | int, kind: str | None = "compute") -> float:
        """The fraction of the time in which the device did something of that kind, 0 to 1.

        kind is "compute", "transfer" or "collective"; None is any of them, so that 1 − busy(device, None) is idle.
        """
        index = self._index(device)
        spans = [
            (e.start, e.end)
            for e in self.events
            if self._on(e, index) and kind in (None, e.kind)
        ]
        total = sum(end - start for start, end in merged(spans, self.start, self.end))
        return total / (self.end - self.start) if self.end > self.start else 0.0

    def idle(self, device: torch.device | str | int) -> float:
        """The fraction of the time in which the device did not compute, 0 to 1."""
        return 1 - self.busy(device)

    def plot(
        self, target: "str | Path | Axes | None" = None, title: str | None = None
    ) -> "Figure | Path":
        """Draw one lane a device: what it computes, grey where it is idle, and below it transfers and collectives.

        `target` is a file (.png, .svg, .pdf) to write, the axes to draw into, or None for a new figure, which shows
        itself in a notebook. Gives the path, or the figure.
        """
        if target is None or isinstance(target, (str, Path)):
            picture = figure(8, 0.9 + 0.75 * len(self.lanes))
            axes = picture.add_subplot()
        else:
            picture, axes = target.figure, target
        scale, unit = next(((s, u) for s, u in UNITS if self.end - self.start >= s), UNITS[-1])
        shown = {}
        for lane in range(len(self.lanes)):
            axes.broken_barh(
                [(0, (self.end - self.start) / scale)],
                (lane + 0.1, 0.6),
                color=IDLE,
                linewidth=0,
            )
            for name, (colour, height, bottom) in STYLES.items():
                spans = [
                    (e.start, e.end)
                    for e in self.events
                    if self._on(e, lane) and style(e) == name
                ]
                bars = [
                    ((s - self.start) / scale, (t - s) / scale)
                    for s, t in merged(spans, self.start, self.end)
                ]
                if bars:
                    shown[name] = axes.broken_barh(
                        bars, (lane + bottom, height), color=colour, linewidth=0
                    )
            axes.text(
                1.005,
                lane + 0.4,
                f"busy {self.busy(lane):.0%}",
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=8,
            )
        axes.set_yticks([lane + 0.4 for lane in range(len(self.lanes))], self.lanes)
        axes.set(xlim=(0, (self.end - self.start) / scale), ylim=(len(self.lanes), 0))
        axes.set_xlabel(
            f"simulated time ({unit})", loc="left"
        )  # what is simulated stands at the right
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        handles = [*shown.values(), axes.broken_barh([], (0, 0), color=IDLE)]
        axes.legend(
            handles,
            [*shown, "idle"],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=6,
            frameon=False,
            fontsize=8,
            handlelength=1,
        )
        axes.annotate(
            self.label,
            (1, 0),
            (0, -21),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7,
            color="#555555",
        )
        if title:
            axes.set_title(title, pad=22)
        if isinstance(target, (str, Path)):
            return save(picture, target)
        return picture

    def chrome_trace(self, path: str | Path) -> Path:
        """Write a trace that chrome://tracing and ui.perfetto.dev show: a process a device, a row a kind of event."""
        rows: list[dict[str, Any]] = [
            {
                "ph": "M",
                "pid": index,
                "name": "process_name",
                "args": {"name": f"{lane} ({self.label})"},
            }
            for index, lane in enumerate(self.lanes)
        ]
        for event in self.events:
            rows.append(
                {
                    "ph": "X", "pid": event.device, "tid": event.kind, "cat": event.phase or event.kind, "name": event.name,
                    "ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6,
                }
            )  # fmt: skip
        with atomic(path) as temporary:
            temporary.write_text(
                json.dumps({"traceEvents": rows, "otherData": {"label": self.label}})
            )
        return Path(path)

    def _index(self, device: torch.device | str | int) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is None or not 0 <= index < len(self.lanes):
            raise UserError(
                f"{device} is not in this timeline: it has {', '.join(self.lanes)}."
            )
        return index

    @staticmethod
    def _on(event: Event, index: int) -> bool:
        """A transfer between two devices is work of both."""
        return event.device == index or (event.kind == "transfer" and event.peer == index)


def style(event: Event) -> str:
    return event.phase if event.kind == "compute" else event.kind


def merged(
    spans: Iterable[tuple[float, float]], start: float, end: float
) -> list[tuple[float, float]]:
    """The union of spans within [start, end], as disjoint spans in order."""
    whole: list[tuple[float, float]] = []
    for begin, stop in sorted((max(s, start), min(t, end)) for s, t in spans):
        if whole and begin <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(stop, whole[-1][1]))
        elif stop > begin:
            whole.append((begin, stop))
    return whole


def readable(seconds: float) -> str:
    scale, unit = next(((s, u) for s, u in UNITS if seconds >= s), UNITS[-1])
    return f"{seconds / scale:.2f} {unit}"
