"""The picture of a timeline: one lane for each device."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multigpu.plots import COLLECTIVE, COMPUTE, IDLE, TRANSFER, UPDATE, figure, save
from multigpu.vgpu.sim.clock import Event
from multigpu.vgpu.sim.spans import involves, merge_spans, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    from multigpu.vgpu.sim.timeline import Timeline

# The palette's light blue. Forward has a darker blue, because both are computation.
BACKWARD = "#56B4E9"


class Style(NamedTuple):
    """How a kind of event is drawn: its colour, and its height and lower edge in its lane.

    A lane has the height 1.
    """

    colour: str
    height: float
    bottom: float


STYLES = {
    "forward": Style(COMPUTE, 0.5, 0.15),
    "backward": Style(BACKWARD, 0.5, 0.15),
    "update": Style(UPDATE, 0.5, 0.15),
    "transfer": Style(TRANSFER, 0.13, 0.7),
    "collective": Style(COLLECTIVE, 0.13, 0.83),
}


def plot(
    timeline: "Timeline", target: "str | Path | Axes | None", title: str | None
) -> "Figure | Path":
    """Draw the timeline into a file, into axes, or into a new figure; see Timeline.plot."""
    to_file = isinstance(target, (str, Path))
    if target is None or to_file:
        picture = figure(8, 0.9 + 0.75 * len(timeline.lanes))
        axes = picture.add_subplot()
    else:
        picture = target.figure
        axes = target
    scale, unit = unit_of(timeline.end - timeline.start)
    drawn: dict[str, PolyCollection] = {}
    for lane in range(len(timeline.lanes)):
        drawn |= _draw_lane(axes, timeline, lane, scale)
    _label(axes, timeline, scale, unit)
    handles = [*drawn.values(), axes.broken_barh([], (0, 0), color=IDLE)]
    axes.legend(
        handles,
        [*drawn, "idle"],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=6,
        frameon=False,
        fontsize=8,
        handlelength=1,
    )
    if title:
        axes.set_title(title, pad=22)
    return save(picture, target) if to_file else picture


def style_name(event: Event) -> str:
    """The event's key in STYLES."""
    return event.phase if event.kind == "compute" else event.kind


def _draw_lane(
    axes: "Axes", timeline: "Timeline", lane: int, scale: float
) -> "dict[str, PolyCollection]":
    """Draw one device's events; return the bars by the name of their style."""
    duration = timeline.end - timeline.start
    axes.broken_barh([(0, duration / scale)], (lane + 0.1, 0.6), color=IDLE, linewidth=0)
    drawn = {}
    for name, style in STYLES.items():
        spans = [
            (event.start, event.end)
            for event in timeline.events
            if involves(event, lane) and style_name(event) == name
        ]
        bars = [
            ((start - timeline.start) / scale, (end - start) / scale)
            for start, end in merge_spans(spans, timeline.start, timeline.end)
        ]
        if bars:
            position = (lane + style.bottom, style.height)
            drawn[name] = axes.broken_barh(bars, position, color=style.colour, linewidth=0)
    axes.text(
        1.005,
        lane + 0.4,
        f"busy {timeline.busy(lane):.0%}",
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=8,
    )
    return drawn


def _label(axes: "Axes", timeline: "Timeline", scale: float, unit: str) -> None:
    """Name the lanes and the time axis, and write the machine's label below the right end."""
    count = len(timeline.lanes)
    axes.set_yticks([lane + 0.4 for lane in range(count)], timeline.lanes)
    axes.set(xlim=(0, (timeline.end - timeline.start) / scale), ylim=(count, 0))
    # At the left, because the machine's label is at the right.
    axes.set_xlabel(f"simulated time ({unit})", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.annotate(
        timeline.label,
        (1, 0),
        (0, -21),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=7,
        color="#555555",
    )
