"""One style for all figures: the same colours in every lesson, readable without colour too."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008): colour-blind readers can distinguish these too.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
SKY_BLUE = "#56B4E9"
RED = "#D55E00"
YELLOW = "#F0E442"
BLACK = "#000000"
RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, RED, YELLOW, BLACK)
# White text is readable on the colours of these ranks, black text on the others.
WHITE_TEXT_RANKS = (0, 2, 5, 7)

COMPUTE = BLUE
TRANSFER = ORANGE
COLLECTIVE = GREEN
UPDATE = PURPLE
IDLE = "#DDDDDD"
# The parts of a step and of a device's memory: colour of the bar, colour of the text on it.
PARTS = {
    "data": (TRANSFER, "black"),
    "forward": (COMPUTE, "white"),
    "backward": (SKY_BLUE, "black"),
    "update": (UPDATE, "black"),
    "weights": (COMPUTE, "white"),
    "gradients": (SKY_BLUE, "black"),
    "optimizer": (UPDATE, "black"),
    "activations": (YELLOW, "black"),
    "16-bit copies": (TRANSFER, "black"),
}


def figure(width: float = 8, height: float = 3) -> "Figure":
    """An empty figure of `width` × `height` inches; a cell that ends with it shows it.

    matplotlib is imported only when something is drawn. pyplot, which opens windows, is never
    imported.
    """
    from matplotlib.figure import Figure

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


def by_epoch(epochs: Sequence[int], curves: dict[str, list[float]], title: str) -> "Figure":
    """One panel per curve, side by side, each with its own y axis.

    `curves` has one value per epoch for each name. An accuracy's y axis ends at 1.02.
    """
    from matplotlib.ticker import MaxNLocator

    fig = figure()
    for index, (name, values) in enumerate(curves.items()):
        axes = fig.add_subplot(1, len(curves), index + 1)
        axes.plot(epochs, values, marker="o", markersize=3, color=RANKS[index])
        axes.set(xlabel="epoch", ylabel=name, ylim=(0, 1.02 if "accuracy" in name else None))
        axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
        # The default is at least two ticks: with one epoch they would be at fractions.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle(title)
    return fig


def curves(history: list[dict], path: str | Path, title: str) -> Path:
    """Draw loss and test accuracy by epoch into `path`, atomically.

    `title` should state the result. `history` has one dict per epoch, as `metrics.row` takes
    it.
    """
    keys = {"training loss": "loss", "test accuracy": "test_accuracy"}
    values = {name: [row[key] for row in history] for name, key in keys.items()}
    return save(by_epoch([row["epoch"] for row in history], values, title), path)


def shards(
    epochs: list[list[list[int]]],
    title: str,
    rows: list[str] | None = None,
    images_per_step: int = 1,
) -> "Figure":
    """Draw which rank reads which image; epochs[epoch][rank] is a list of image numbers.

    One row per epoch, one cell per image. `rows` names the rows if they are not epochs;
    `images_per_step` is the number of images that a rank reads in a step.
    """
    fig = figure(8, 0.9 + 0.7 * len(epochs))
    axes = fig.add_subplot()
    for row, ranks in enumerate(epochs):
        for rank, images in enumerate(ranks):
            for step, image in enumerate(images):
                axes.barh(row, 1, left=image, color=RANKS[rank], edgecolor="white", height=0.8)
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
                    f"{step // images_per_step + 1}",
                    ha="right",
                    va="bottom",
                    color=text,
                    fontsize=7,
                )
    total = sum(len(images) for images in epochs[0])
    axes.set(
        xlim=(0, total),
        xlabel="image (large: the rank or replica that reads it; small: in which step)",
        title=title,
    )
    axes.set_yticks(range(len(epochs)), rows or [f"epoch {i}" for i in range(len(epochs))])
    axes.set_xticks([i + 0.5 for i in range(total)], range(total), fontsize=7)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return fig


def stacked_bars(
    bars: dict[str, dict[str, float]], unit: str, title: str, totals: bool = False
) -> "Figure":
    """Horizontal bars, each divided into parts: bars[name][part] is an amount in `unit`.

    A part that PARTS names has the colours given there. A part shows its name and percentage;
    the legend names the parts that are too narrow. With `totals` each part shows its amount,
    the end of each bar shows the sum, and the legend names all parts.
    """
    fig = figure(8, 1 + 0.45 * len(bars))
    axes = fig.add_subplot()
    longest = max(sum(parts.values()) for parts in bars.values()) or 1
    amounts_only = totals or all(len(parts) == 1 for parts in bars.values())
    in_legend = {}
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for part, amount in parts.items():
            colour, text_colour = PARTS.get(part, (RANKS[0], "white"))
            bar = axes.barh(
                row, amount, left=left, color=colour, edgecolor="white", height=0.7
            )
            percentage = f"{amount / (sum(parts.values()) or 1):.0%}"
            texts = [f"{amount:,.0f}"] if amounts_only else [f"{part} {percentage}", part]
            # The longest bar has room for about 85 characters.
            room = 85 * amount / longest
            text = next((text for text in texts if len(text) < room), "")
            middle = left + amount / 2
            style = {"ha": "center", "va": "center", "color": text_colour, "fontsize": 8}
            axes.text(middle, row, text, **style)
            left += amount
            if amount and (totals or not text):
                in_legend[part] = bar
        if totals:
            axes.text(
                left + longest / 100,
                row,
                f"{left:,.0f}",
                va="center",
                weight="bold",
                fontsize=9,
            )
    axes.set(xlabel=unit, title=title)
    axes.set_yticks(range(len(bars)), list(bars))
    if totals:
        # Leave room for the longest bar's sum.
        axes.set_xlim(0, 1.08 * longest)
    if in_legend:
        in_bars_order = dict.fromkeys(part for parts in bars.values() for part in parts)
        names = [part for part in in_bars_order if part in in_legend]
        handles = [in_legend[part] for part in names]
        fig.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return fig


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
    for colour, marker, (name, values) in zip(RANKS, "os^Dv", curves.items(), strict=False):
        style = {"marker": marker, "markersize": 4, "color": colour, "label": name}
        if name == dashed:
            style |= {"linestyle": (0, (3, 5)), "markersize": 8, "markerfacecolor": "none"}
        axes.plot(x, values, **style)
    if level is not None:
        axes.axhline(level, color="black", linestyle=":", linewidth=1)
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return fig
