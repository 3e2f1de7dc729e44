"""One style for all pictures: the same colour for the same thing in every lesson, readable without colour too."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008): told apart by colour-blind readers too.
RANKS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#000000",
)
COMPUTE, TRANSFER, COLLECTIVE, UPDATE, IDLE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#DDDDDD",
)
# The parts of a step and of a device's memory: colour, and what stands out on it.
PARTS = {
    "data": (TRANSFER, "black"), "forward": (COMPUTE, "white"), "backward": ("#56B4E9", "black"),
    "update": (UPDATE, "black"),
    "weights": (COMPUTE, "white"), "gradients": ("#56B4E9", "black"), "optimizer": (UPDATE, "black"),
    "activations": ("#F0E442", "black"), "16-bit copies": (TRANSFER, "black"),
}  # fmt: skip


def figure(width: float = 8, height: float = 3) -> "Figure":
    """An empty figure, in inches, of the width of a notebook, which shows itself as the last value of a cell.

    matplotlib is imported only when something is drawn, and pyplot, with its windows, not at all.
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
    """Write a figure, whole or not at all, in the format that the path's ending says; the path."""
    with atomic(path) as temporary:
        fig.savefig(temporary, format=Path(path).suffix[1:])
    return Path(path)


def by_epoch(epochs: Sequence[int], curves: dict[str, list[float]], title: str) -> "Figure":
    """A panel a curve, side by side, as a loss and an accuracy have no axis in common. An accuracy's axis ends at 1."""
    from matplotlib.ticker import MaxNLocator

    fig = figure()
    for place, (name, values) in enumerate(curves.items()):
        axes = fig.add_subplot(1, len(curves), place + 1)
        axes.plot(epochs, values, marker="o", markersize=3, color=RANKS[place])
        axes.set(xlabel="epoch", ylabel=name, ylim=(0, 1.02 if "accuracy" in name else None))
        axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
        # By default it wants two ticks, and for a single epoch takes tenths.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.spines[["top", "right"]].set_visible(False)
    fig.suptitle(title)
    return fig


def curves(history: list[dict], path: str | Path, title: str) -> Path:
    """Draw loss and test accuracy by epoch into `path`, atomically. The title states the finding."""
    keys = {"training loss": "loss", "test accuracy": "test_accuracy"}
    found = {name: [row[key] for row in history] for name, key in keys.items()}
    return save(by_epoch([row["epoch"] for row in history], found, title), path)


def shares(
    epochs: list[list[list[int]]], title: str, rows: list[str] | None = None, piece: int = 1
) -> "Figure":
    """Who reads which image: epochs[epoch][rank] is the list of image numbers. One row an epoch, one cell an image.

    `rows` names the rows if they are no epochs; `piece` is the number of images that a rank reads in a step.
    """
    fig = figure(8, 0.9 + 0.7 * len(epochs))
    axes = fig.add_subplot()
    for row, ranks in enumerate(epochs):
        for rank, images in enumerate(ranks):
            for step, image in enumerate(images):
                axes.barh(row, 1, left=image, color=RANKS[rank], edgecolor="white", height=0.8)
                text = (
                    "white" if rank in (0, 2, 5, 7) else "black"
                )  # what contrasts with RANKS[rank]
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
                    f"{step // piece + 1}",
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


def stacked(
    bars: dict[str, dict[str, float]], unit: str, title: str, totals: bool = False
) -> "Figure":
    """What things are made of: bars[thing][part] is an amount in `unit`, drawn side by side. Parts that are PARTS' keys have its
    colours; a legend names what is too narrow for its name. With `totals`, amounts stand in the parts in the place of
    names and shares, their sum at a bar's end, and the legend names all parts."""
    fig = figure(8, 1 + 0.45 * len(bars))
    axes = fig.add_subplot()
    longest = max(sum(parts.values()) for parts in bars.values()) or 1
    plain = totals or all(len(parts) == 1 for parts in bars.values())
    narrow = {}
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for part, amount in parts.items():
            colour, ink = PARTS.get(part, (RANKS[0], "white"))
            bar = axes.barh(
                row, amount, left=left, color=colour, edgecolor="white", height=0.7
            )
            share = f"{amount / (sum(parts.values()) or 1):.0%}"
            texts = (f"{amount:,.0f}", "") if plain else (f"{part} {share}", part, "")
            text = next(
                text for text in texts if len(text) < 85 * amount / longest or not text
            )  # 85 letters a figure
            axes.text(
                left + amount / 2, row, text, ha="center", va="center", color=ink, fontsize=8
            )
            left += amount
            if amount and (totals or not text):
                narrow[part] = bar
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
        axes.set_xlim(0, 1.08 * longest)  # room for the longest bar's sum
    if narrow:
        order = [
            part
            for part in dict.fromkeys(part for parts in bars.values() for part in parts)
            if part in narrow
        ]
        handles = [narrow[part] for part in order]
        fig.legend(handles, order, loc="outside right center", frameon=False, fontsize=8)
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
    """One curve a name over `x`, which is spaced by powers of two or evenly; a dotted line where y is `level`.

    The curve named `dashed` has gaps and hollow marks: it lies on another one, which shows through.
    """
    fig = figure(8, 3)
    axes = fig.add_subplot()
    for colour, mark, (name, values) in zip(RANKS, "os^Dv", curves.items(), strict=False):
        over = (
            {"linestyle": (0, (3, 5)), "markersize": 8, "markerfacecolor": "none"}
            if name == dashed
            else {}
        )
        axes.plot(
            x,
            values,
            **{"marker": mark, "markersize": 4, "color": colour, "label": name} | over,
        )
    if level is not None:
        axes.axhline(level, color="black", linestyle=":", linewidth=1)
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return fig
