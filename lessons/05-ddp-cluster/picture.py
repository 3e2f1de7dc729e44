"""Draws one-step.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/05-ddp-cluster/picture.py
"""

from pathlib import Path

from multigpu import plots

SHARDS = ("1st, 5th, …", "2nd, 6th, …", "3rd, 7th, …", "4th, 8th, …")

figure = plots.figure(9, 4.2)
axes = figure.add_subplot()


def box(
    rank: int, left: float, width: float, text: str, colour: str, ink: str = "black"
) -> None:
    """A coloured box on a rank's lane, with a text in the middle."""
    axes.barh(rank, width, left=left, color=colour, height=0.5, edgecolor="white")
    axes.text(left + width / 2, rank, text, ha="center", va="center", fontsize=8, color=ink)


def all_reduce(rank: int, left: float, width: float, text: str) -> None:
    """A hatched bar below a rank's boxes, for what runs at the same time as backward."""
    lane = rank + 0.38
    axes.barh(
        lane,
        width,
        left=left,
        color=plots.COLLECTIVE,
        edgecolor="white",
        height=0.22,
        hatch="///",
    )
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.text(left + width / 2, lane, text, ha="center", va="center", fontsize=7, bbox=white)


def mark(left: float, text: str, align: str) -> None:
    """A dashed line over all lanes, with a text above."""
    axes.plot([left, left], [-0.35, 3.55], color="black", linewidth=0.8, linestyle="--")
    axes.text(left, -0.42, text, ha=align, va="bottom", fontsize=7.5)


for rank, shard in enumerate(SHARDS):
    box(rank, 0, 0.9, f"16 of 64 images:\nthe {shard}", plots.TRANSFER)
    box(rank, 1.0, 0.9, "forward", plots.COMPUTE, ink="white")
    box(rank, 1.9, 1.0, "last layers backward", plots.COMPUTE, ink="white")
    box(rank, 2.9, 1.1, "first layers backward", plots.COMPUTE, ink="white")
    box(rank, 4.62, 0.75, "update", plots.UPDATE)
    all_reduce(rank, 2.9, 0.85, "bucket 1")
    all_reduce(rank, 4.0, 0.6, "bucket 2")
mark(2.9, "the last layers' gradients are ready:\nthe all-reduce of bucket 1 begins", "center")
mark(4.0, "bucket 2", "left")
axes.axhline(1.67, color="black", linestyle=":", linewidth=1)
axes.text(5.5, 0.5, "node 0", va="center", fontsize=9)
axes.text(5.5, 2.5, "node 1", va="center", fontsize=9)

axes.set(
    xlim=(-0.05, 5.95),
    ylim=(3.7, -0.95),
    xticks=[],
    xlabel="time →   (a schematic, nothing here is measured)",
    title="One step of DDP: ranks read different images, and average their gradients",
)
axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)])
axes.spines[:].set_visible(False)
axes.tick_params(length=0)
print(plots.save(figure, Path(__file__).with_name("one-step.png")).name)
