"""The picture of a timeline: one lane for each device."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multigpu.plots import EDGE, INK, PARTS, figure, save
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.idle import REASONS, idle_spans
from multigpu.virtual.sim.spans import Span, involves, merge_spans, unit_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from multigpu.virtual.sim.timeline import Timeline

# A lane has the height 1. From the top: computation (its upper edge and its height), then a
# band for each kind of communication, then the texts that name what is carried.
COMPUTATION = (0.06, 0.46)
COMMUNICATION = ("transfer", "collective")
BAND_HEIGHT = 0.12
LANE_INCHES = 0.82
# A band that is shorter than this fraction of the axis is drawn this long, so that it is seen.
SHORTEST_BAND = 0.004
# A micro-batch with a gap longer than this fraction of the time is drawn as two boxes.
LONGEST_GAP = 0.05
# The width of a character of the contents' texts, as a fraction of the axis.
CHARACTER = 0.0085
# Equal transfers one after the other have one text. The text is written again if the distance
# from one to the next is at least this fraction of the axis.
REPEAT = 0.15
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}


class Bar(NamedTuple):
    """A box: its span in seconds, the part that gives its look, and the text in it."""

    start: float
    end: float
    part: str
    text: str


def plot(
    timeline: "Timeline",
    target: "str | Path | Axes | None",
    title: str | None,
    contents: Callable[[Event], str] | None,
    until: float | None,
    shares: bool,
) -> "Figure | Path":
    """Draw the timeline into a file, into axes, or into a new figure; see Timeline.plot."""
    to_file = isinstance(target, (str, Path))
    if target is None or to_file:
        picture = figure(8, 0.9 + LANE_INCHES * len(timeline.lanes))
        axes = picture.add_subplot()
    else:
        picture = target.figure
        axes = target
    duration = timeline.end - timeline.start
    scale, unit = unit_of(until or duration)
    axes.set_xlim(0, (until or duration) / scale)
    legend: dict[str, Artist] = {}
    for lane in range(len(timeline.lanes)):
        legend |= _draw_computation(axes, timeline, lane, scale)
        legend |= _draw_bubbles(axes, timeline, lane, scale)
        legend |= _draw_bands(axes, timeline, lane, scale, contents)
        if shares:
            _write_share(axes, timeline, lane)
    _label(axes, timeline, unit)
    names = [name for name in (*PARTS, "bubble") if name in legend]
    if names:
        axes.legend(
            [legend[name] for name in names],
            names,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(names),
            handlelength=1.6,
            borderaxespad=0.2,
        )
    if title:
        axes.set_title(title, pad=20 if names else 6)
    return save(picture, target) if to_file else picture


def part_of(event: Event, note: str = "") -> str:
    """The key in PARTS of an event's look. A note that names a part replaces the phase."""
    if event.kind != "compute":
        return event.kind
    return note if note in PARTS else event.phase


def bars_of(timeline: "Timeline", lane: int) -> list[Bar]:
    """A lane's computation as bars, in order: equal events that touch each other are one bar.

    The bars of a micro-batch have its number as text.
    """
    bars: list[Bar] = []
    for event in timeline.events:
        if event.kind != "compute" or event.device != lane:
            continue
        note = timeline.notes.get(event, "")
        part = part_of(event, note)
        # The optimizer's step belongs to no micro-batch.
        text = "" if note in PARTS or event.phase == "update" else note
        bar = Bar(max(event.start, timeline.start), min(event.end, timeline.end), part, text)
        if bars and bars[-1][2:] == bar[2:] and bar.start <= bars[-1].end:
            # A kernel of another stream can end within one that pauses for it.
            before = bars.pop()
            bar = bar._replace(start=before.start, end=max(before.end, bar.end))
        bars.append(bar)
    return bars


def _draw_computation(
    axes: "Axes", timeline: "Timeline", lane: int, scale: float
) -> "dict[str, Artist]":
    """Draw a lane's frame and its boxes; return an artist for each part."""
    top, height = COMPUTATION
    duration = timeline.end - timeline.start
    frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.8}
    axes.broken_barh([(0, duration / scale)], (lane + top, height), zorder=3, **frame)
    drawn = {}
    bars = bars_of(timeline, lane)
    for part in dict.fromkeys(bar.part for bar in bars):
        look = PARTS[part]
        spans = [
            ((bar.start - timeline.start) / scale, (bar.end - bar.start) / scale)
            for bar in bars
            if bar.part == part
        ]
        drawn[part] = axes.broken_barh(
            spans,
            (lane + top, height),
            facecolor=look.fill,
            edgecolor=EDGE,
            linewidth=0,
            hatch=look.hatch,
        )
    for text, start, end in _numbered(bars, LONGEST_GAP * duration):
        left = (start - timeline.start) / scale
        right = (end - timeline.start) / scale
        # A line between micro-batches that touch each other.
        axes.plot([left, left], [lane + top, lane + top + height], color=EDGE, linewidth=0.6)
        if right - left > 1.5 * CHARACTER * len(text) * axes.get_xlim()[1]:
            part = next(bar.part for bar in bars if bar.start == start)
            axes.text(
                (left + right) / 2,
                lane + top + height / 2,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color=PARTS[part].text,
            )
    return drawn


def _numbered(bars: list[Bar], longest_gap: float) -> Iterator[tuple[str, float, float]]:
    """(number, start, end) of each run of bars with one number and one part.

    Gaps between launches divide a micro-batch into several bars. A gap of more than
    `longest_gap` seconds ends the run.
    """
    run: list[Bar] = []
    for bar in [*bars, Bar(0.0, 0.0, "", "")]:
        if run and (bar[2:] != run[0][2:] or bar.start > run[-1].end + longest_gap):
            if run[0].text:
                yield run[0].text, run[0].start, run[-1].end
            run = []
        run.append(bar)


def _draw_bubbles(
    axes: "Axes", timeline: "Timeline", lane: int, scale: float
) -> "dict[str, Artist]":
    """Hatch a lane's bubbles; return an artist for the legend."""
    top, height = COMPUTATION
    spans = idle_spans(timeline, lane)["bubble"]
    if not spans:
        return {}
    boxes = [((start - timeline.start) / scale, (end - start) / scale) for start, end in spans]
    look = {"facecolor": "none", "edgecolor": INK, "hatch": "///", "linewidth": 0}
    drawn = axes.broken_barh(boxes, (lane + top, height), zorder=0, **look)
    return {"bubble": drawn}


def _draw_bands(
    axes: "Axes",
    timeline: "Timeline",
    lane: int,
    scale: float,
    contents: Callable[[Event], str] | None,
) -> "dict[str, Artist]":
    """Draw transfers and collectives below the computation, with what they carry."""
    width = axes.get_xlim()[1]
    drawn = {}
    # All lanes have the same bands, so that equal things are at equal places.
    kinds = [kind for kind in COMMUNICATION if any(e.kind == kind for e in timeline.events)]
    bottom = sum(COMPUTATION) + 0.02
    labels: list[tuple[float, str]] = []
    for kind in kinds:
        top = bottom
        bottom += BAND_HEIGHT + 0.01
        events = [e for e in timeline.events if e.kind == kind and involves(e, lane)]
        spans = [(event.start, event.end) for event in events]
        spans = merge_spans(spans, timeline.start, timeline.end)
        if not spans:
            continue
        look = PARTS[kind]
        drawn[kind] = axes.broken_barh(
            [_band(span, timeline.start, scale, width) for span in spans],
            (lane + top, BAND_HEIGHT),
            facecolor=look.fill,
            edgecolor=EDGE,
            linewidth=0.4,
        )
        for event in events:
            text = _contents_label(timeline, event, contents)
            labels.append((max(event.start - timeline.start, 0.0) / scale, text))
    for left, text in _joined(sorted(labels), width):
        left = min(left, width - CHARACTER * width * len(text))
        axes.text(left, lane + bottom + 0.02, text, fontsize=7, ha="left", va="top")
    return drawn


def _joined(labels: list[tuple[float, str]], width: float) -> list[tuple[float, str]]:
    """The labels (left edge, text) that fit on an axis of `width`.

    Labels that would cover each other are joined, and equal texts in them are written once. A
    label is left out if the label before it with the same text is nearer than REPEAT of the
    axis.
    """
    joined: list[tuple[float, list[str]]] = []
    last: dict[str, float] = {}
    for left, text in labels:
        before = last.get(text, -width)
        last[text] = left
        if not text or left - before < REPEAT * width:
            continue
        if joined and left < joined[-1][0] + CHARACTER * width * len("; ".join(joined[-1][1])):
            if not any(text in shown for shown in joined[-1][1]):
                joined[-1][1].append(text)
        else:
            joined.append((left, [text]))
    return [(left, "; ".join(texts)) for left, texts in joined]


def _band(span: Span, begin: float, scale: float, width: float) -> tuple[float, float]:
    """(left edge, length) of a band on an axis of `width`; see SHORTEST_BAND."""
    length = max((span[1] - span[0]) / scale, SHORTEST_BAND * width)
    return min((span[0] - begin) / scale, width - length), length


def _contents_label(
    timeline: "Timeline", event: Event, contents: Callable[[Event], str] | None
) -> str:
    """The text below a transfer or a collective: "weights", "all-reduce: gradients".

    What a transfer between a program's devices carries is noted when it is simulated. A
    collective that starts in backward carries gradients. For the others, `contents` knows.
    """
    carried = contents(event) if contents else ""
    carried = carried or timeline.notes.get(event, "")
    if event.kind == "transfer":
        return carried
    if not carried and event.phase == "backward":
        carried = "gradients"
    name = COLLECTIVES.get(event.name, event.name)
    return f"{name}: {carried}" if carried else name


def _write_share(axes: "Axes", timeline: "Timeline", lane: int) -> None:
    """Write beside a lane the shares of computing, the main reason for waiting, the bubble.

    Transfers and collectives are one reason, named by the kind that takes more of the time.
    A reason with less than 0.5% of the time is left out.
    """
    shares = timeline.breakdown(lane)
    main = max(REASONS, key=lambda name: shares[name])
    text = f"busy {shares['compute']:.0%}"
    for reason in dict.fromkeys((main, "bubble")):
        name = reason
        if reason == "transfer":
            name = max(COMMUNICATION, key=lambda kind: timeline.busy(lane, kind))
        if shares[reason] >= 0.005:
            text += f"\n{name} {shares[reason]:.0%}"
    axes.text(
        1.005,
        lane + COMPUTATION[0] + COMPUTATION[1] / 2,
        text,
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=8,
    )


def _label(axes: "Axes", timeline: "Timeline", unit: str) -> None:
    """Name the lanes and the time axis, and write the machine's label below the right end."""
    count = len(timeline.lanes)
    middle = COMPUTATION[0] + COMPUTATION[1] / 2
    # Readers know a virtual GPU by the name that programs use.
    names = [lane.replace("vgpu", "cuda") for lane in timeline.lanes]
    axes.set_yticks([lane + middle for lane in range(count)], names)
    axes.set_ylim(count, 0)
    # At the left, because the machine's label is at the right.
    axes.set_xlabel(f"simulated time ({unit})", loc="left")
    axes.spines["left"].set_visible(False)
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
    )
