"""One style for all figures: the same colours in every lesson, readable without colour too.

The background is transparent. Text and lines outside of boxes have the colour INK, which is
readable on white paper and on the dark themes of GitHub and JupyterLab. Text in a box has the
colour that PARTS gives for the box's fill. Hatches distinguish the fills in black and white.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multigpu.files import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

# Okabe and Ito's palette (2008): colour-blind readers can distinguish these too.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY_BLUE = "#56B4E9"
RED = "#D55E00"
YELLOW = "#F0E442"
BLACK = "#000000"
GREY = "#DDDDDD"

# The contrast with white is 4.5 : 1, with GitHub's and JupyterLab's dark themes over 4 : 1.
INK = "#767676"
# The edges and hatches of filled boxes. On a dark background the fills are visible by
# themselves.
EDGE = BLACK
# Curves: those colours of the palette that are visible on white and on dark backgrounds.
LINES = (BLUE, RED, GREEN, PURPLE, INK)
MARKERS = "os^DvPX"
# Fills for the numbers 0, 1, …, which are written in the boxes.
RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, RED, YELLOW, BLACK)
# White text is readable on the fills of these ranks, black text on the others.
WHITE_TEXT_RANKS = (0, 7)


class Look(NamedTuple):
    """How a part is drawn: its fill, the colour of text on it, and its hatch ("": none)."""

    fill: str
    text: str
    hatch: str = ""


# The parts of a step, of a device's memory, and of the lessons' schematics.
PARTS = {
    "compute": Look(BLUE, "white"),
    "forward": Look(BLUE, "white"),
    "backward": Look(SKY_BLUE, "black"),
    "update": Look(PURPLE, "black", "...."),
    "quantise": Look(RED, "black", "xxxx"),
    "data": Look(ORANGE, "black", "///"),
    "bucket copies": Look(ORANGE, "black", "///"),
    "transfer": Look(ORANGE, "black", "////"),
    "collective": Look(GREEN, "black", r"\\\\"),
    "idle": Look(GREY, "black"),
    "files": Look(YELLOW, "black", "---"),
    "weights": Look(BLUE, "white"),
    "gradients": Look(SKY_BLUE, "black"),
    "optimizer": Look(PURPLE, "black", "..."),
    "workspaces": Look(GREY, "black", "ooo"),
    "activations": Look(YELLOW, "black"),
    "activations and other": Look(YELLOW, "black"),
    "16-bit copies": Look(ORANGE, "black", "///"),
    "logits": Look(RED, "black", "xxxx"),
    "temporaries": Look(GREEN, "black", r"\\\\"),
    # Bars without parts: their amount as a whole.
    "sent": Look(BLUE, "white"),
    "predicted": Look(BLUE, "white"),
    # A step on n GPUs: 1/n of one GPU's time, and what each cause adds to it. The names are
    # those of scaling/prediction.py.
    "ideal": Look(BLUE, "white"),
    "computing too small": Look(SKY_BLUE, "black"),
    "copies into buckets": Look(ORANGE, "black", "///"),
    "latency of the all-reduces": Look(YELLOW, "black", "---"),
    "bandwidth inside a node": Look(GREEN, "black", r"\\\\"),
    "bandwidth between nodes": Look(RED, "black", "xxxx"),
    "stragglers": Look(PURPLE, "black", "...."),
    "input pipeline": Look(GREY, "black"),
}
STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
}


def figure(width: float = 8, height: float = 3) -> "Figure":
    """An empty figure of `width` × `height` inches; a cell that ends with it shows it.

    matplotlib is imported only when something is drawn. pyplot, which opens windows, is never
    imported. STYLE becomes matplotlib's default in this process.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Not rc_context: text that is added to the figure later needs the same colours.
    matplotlib.rcParams.update(STYLE)

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

        def __repr__(self) -> str:
            return "<picture>"

    return Picture(figsize=(width, height), layout="constrained", dpi=110)


def save(fig: "Figure", path: str | Path) -> Path:
    """Write a figure, atomically, in the format of the path's suffix; return the path."""
    with atomic(path) as temporary:
        fig.savefig(temporary, format=Path(path).suffix[1:])
    return Path(path)


def schematic(
    rows: Sequence[str], title: str, width: float = 9, height: float = 3.2
) -> "Axes":
    """Axes for a drawing with `box` and `arrow`, in which nothing is measured.

    Row i is at y = i, from the top. The caller sets xlim.
    """
    axes = figure(width, height).add_subplot()
    axes.set(xticks=[], title=title)
    if rows:
        axes.set_xlabel("time →   (a schematic, nothing here is measured)")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes


def box(
    axes: "Axes",
    part: str,
    left: float,
    middle: float,
    width: float,
    text: str,
    height: float = 0.5,
    size: float = 8,
) -> None:
    """Draw a box in the look of `part`, around y = `middle`, with a text in it.

    `size` is the size of the text in points.
    """
    look = PARTS[part]
    axes.barh(
        middle,
        width,
        left=left,
        height=height,
        color=look.fill,
        edgecolor=EDGE,
        linewidth=0.6,
        hatch=look.hatch,
    )
    axes.text(
        left + width / 2,
        middle,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=look.text,
        bbox=_behind_text(look),
    )


def swatch(part: str) -> "Patch":
    """A small box in the look of `part`, for a legend."""
    from matplotlib.patches import Patch

    look = PARTS[part]
    return Patch(facecolor=look.fill, edgecolor=EDGE, linewidth=0.6, hatch=look.hatch)


def _behind_text(look: Look) -> dict | None:
    """A patch of the fill's colour for behind a text, so that no hatch crosses the text."""
    return {"facecolor": look.fill, "edgecolor": "none", "pad": 1} if look.hatch else None


def arrow(
    axes: "Axes",
    start: tuple[float, float],
    end: tuple[float, float],
    style: str = "->",
    colour: str = INK,
    width: float = 1,
) -> None:
    """Draw an arrow. `style` is matplotlib's arrow style, such as "->" or "<->"."""
    look = {"arrowstyle": style, "color": colour, "linewidth": width}
    axes.annotate("", end, start, arrowprops=look)


def share_legend(fig: "Figure") -> None:
    """Replace the legends of axes that stand one above the other by one below all of them.

    Only the last axes keep the name of their x axis.
    """
    entries = {}
    for axes in fig.axes:
        if legend := axes.get_legend():
            names = [text.get_text() for text in legend.get_texts()]
            entries |= dict(zip(names, legend.legend_handles, strict=True))
            legend.remove()
        axes.set_title(axes.get_title(), pad=6)
    for axes in fig.axes[:-1]:
        axes.set_xlabel(" ")
    names = [name for name in PARTS if name in entries]
    names += [name for name in entries if name not in names]
    handles = [entries[name] for name in names]
    fig.legend(handles, names, loc="outside lower center", ncols=len(names))


def curve_look(index: int) -> dict[str, str]:
    """The colour and the marker of curve number `index`; 35 curves have different ones."""
    return {
        "color": LINES[index % len(LINES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def shards(
    epochs: list[list[list[int]]],
    title: str,
    rows: list[str] | None = None,
    images_per_step: int = 1,
    devices: Sequence[int] = (),
) -> "Figure":
    """Draw which rank reads which image; epochs[epoch][rank] is a list of image numbers.

    One row per epoch, one cell per image. `rows` names the rows if they are not epochs;
    `images_per_step` is the number of images that a rank reads in a step. With `devices`, the
    number of devices of a rank in each row, the small number is the device, not the step: the
    devices get consecutive parts of the rank's images, as in DataParallel.
    """
    fig = figure(8, 0.9 + 0.7 * len(epochs))
    axes = fig.add_subplot()
    for row, ranks in enumerate(epochs):
        for rank, images in enumerate(ranks):
            for place, image in enumerate(images):
                small = place // images_per_step + 1
                if devices:
                    small = place * devices[row] // len(images)
                axes.barh(
                    row,
                    1,
                    left=image,
                    color=RANKS[rank],
                    edgecolor=INK,
                    linewidth=0.8,
                    height=0.8,
                    clip_on=False,  # else half of the outer edges is cut off
                )
                text = "white" if rank in WHITE_TEXT_RANKS else "black"
                axes.text(
                    image + 0.5,
                    row - 0.08,
                    f"{rank}",
                    ha="center",
                    va="center",
                    color=text,
                    weight="bold",
                )
                axes.text(
                    image + 0.9,
                    row + 0.36,
                    f"{small}",
                    ha="right",
                    va="bottom",
                    color=text,
                    fontsize=7,
                )
    total = 1 + max(image for ranks in epochs for images in ranks for image in images)
    axes.set(
        xlim=(0, total),
        xlabel="image (large: the rank or replica that reads it; small: "
        + ("on which of its devices)" if devices else "in which step)"),
        title=title,
    )
    axes.set_yticks(range(len(epochs)), rows or [f"epoch {i}" for i in range(len(epochs))])
    axes.set_xticks([i + 0.5 for i in range(total)], range(total), fontsize=7)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return fig


def stacked_bars(
    bars: dict[str, dict[str, float]],
    unit: str,
    title: str,
    totals: bool = False,
    digits: int = 0,
    ends: Sequence[str] = (),
) -> "Figure":
    """Horizontal bars, each divided into parts: bars[name][part] is an amount in `unit`.

    A part has the look that PARTS gives for its name. It shows its name and percentage; the
    legend names the parts that are too narrow. With `totals` each part shows its amount, the
    end of each bar shows the sum, and the legend names all parts. Amounts are rounded to
    `digits` decimals. `ends` are texts for the ends of the bars, in place of the sums. Raises
    ValueError for a part that PARTS does not have, and for two parts that look the same.
    """
    _check_looks([part for parts in bars.values() for part in parts])
    fig = figure(8, 1 + 0.45 * len(bars))
    axes = fig.add_subplot()
    longest = max(sum(parts.values()) for parts in bars.values()) or 1
    amounts_only = totals or all(len(parts) == 1 for parts in bars.values())
    in_legend = {}
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for part, amount in parts.items():
            look = PARTS[part]
            bar = axes.barh(
                row,
                amount,
                left=left,
                color=look.fill,
                edgecolor=EDGE,
                linewidth=0.6,
                hatch=look.hatch,
                height=0.7,
            )
            percentage = f"{amount / (sum(parts.values()) or 1):.0%}"
            texts = (
                [f"{amount:,.{digits}f}"] if amounts_only else [f"{part} {percentage}", part]
            )
            # The longest bar has room for about 85 characters.
            room = 85 * amount / longest
            text = next((text for text in texts if len(text) + 1 < room), "")
            middle = left + amount / 2
            style = {"ha": "center", "va": "center", "color": look.text, "fontsize": 8}
            axes.text(middle, row, text, bbox=_behind_text(look) if text else None, **style)
            left += amount
            if amount and (totals or not text):
                in_legend[part] = bar
        if totals:
            axes.text(
                left + longest / 100,
                row,
                ends[row] if ends else f"{left:,.{digits}f}",
                va="center",
                weight="bold",
                fontsize=9,
            )
    axes.set(xlabel=unit, title=title)
    axes.set_yticks(range(len(bars)), list(bars))
    # Matplotlib leaves no room for an empty bar, whose sum would stand on the axis.
    axes.set_ylim(-0.5, len(bars) - 0.5)
    if totals:
        # Leave room for the longest bar's sum, or for the longest text: 2% for a character.
        room = max((0.02 * len(text) for text in ends), default=0.08)
        axes.set_xlim(0, (1 + room) * longest)
    if in_legend:
        in_bars_order = dict.fromkeys(part for parts in bars.values() for part in parts)
        names = [part for part in in_bars_order if part in in_legend]
        handles = [in_legend[part] for part in names]
        fig.legend(handles, names, loc="outside right center")
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return fig


def _check_looks(parts: list[str]) -> None:
    """Raise ValueError if PARTS lacks one of the parts, or if two of them look the same."""
    by_look: dict[Look, str] = {}
    for part in dict.fromkeys(parts):
        if part not in PARTS:
            raise ValueError(
                f"the part {part!r} has no look: add it to PARTS in multigpu/plots.py, or "
                f"use one of its names: {', '.join(PARTS)}"
            )
        other = by_look.setdefault(PARTS[part], part)
        if other != part:
            raise ValueError(
                f"the parts {other!r} and {part!r} look the same in one picture: give one of "
                f"them another look in PARTS in multigpu/plots.py"
            )


def lines(
    x: Sequence[float],
    curves: dict[str, list[float]],
    xlabel: str,
    ylabel: str,
    title: str,
    level: float | None = 1,
    powers: bool = True,
    dashed: str = "",
) -> "Figure":
    """Curves over `x`, and a dotted line at y = `level`.

    The x axis is logarithmic with base 2 if `powers`, else linear. The curve named `dashed`
    has gaps and hollow markers, so a curve that it covers stays visible.
    """
    fig = figure(8, 3)
    axes = fig.add_subplot()
    for index, (name, values) in enumerate(curves.items()):
        style = {"markersize": 4, "label": name, **curve_look(index)}
        if name == dashed:
            style |= {"linestyle": (0, (3, 5)), "markersize": 8, "markerfacecolor": "none"}
        axes.plot(x, values, **style)
    if level is not None:
        axes.axhline(level, color=INK, linestyle=":", linewidth=1)
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, ylim=(0, None))
    axes.legend(fontsize=9)
    return fig
