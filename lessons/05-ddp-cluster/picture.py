"""Draws one-step.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/05-ddp-cluster/picture.py
"""

from pathlib import Path

from multigpu import plots
from multigpu.plots import box

SHARDS = ("1st, 5th, …", "2nd, 6th, …", "3rd, 7th, …", "4th, 8th, …")

title = "One step of DDP: ranks read different images, and average their gradients"
rows = [f"rank {rank}" for rank in range(len(SHARDS))]
axes = plots.schematic(rows, title, height=4.2)


def mark(left: float, text: str, align: str) -> None:
    """A dashed line over all lanes, with a text above."""
    axes.plot([left, left], [-0.35, 3.55], color=plots.INK, linewidth=0.8, linestyle="--")
    axes.text(left, -0.42, text, ha=align, va="bottom", fontsize=7.5)


for rank, shard in enumerate(SHARDS):
    box(axes, "data", 0, rank, 0.9, f"16 of 64 images:\nthe {shard}")
    box(axes, "forward", 1.0, rank, 0.9, "forward")
    box(axes, "backward", 1.9, rank, 1.0, "last layers backward")
    box(axes, "backward", 2.9, rank, 1.1, "first layers backward")
    box(axes, "update", 4.62, rank, 0.75, "update")
    # Below the other boxes, because the all-reduce runs at the same time as backward.
    box(axes, "collective", 2.9, rank + 0.38, 0.85, "bucket 1", height=0.22, size=7)
    box(axes, "collective", 4.0, rank + 0.38, 0.6, "bucket 2", height=0.22, size=7)
mark(2.9, "the last layers' gradients are ready:\nthe all-reduce of bucket 1 begins", "center")
mark(4.0, "bucket 2", "left")
axes.axhline(1.67, color=plots.INK, linestyle=":", linewidth=1)
axes.text(5.5, 0.5, "node 0", va="center", fontsize=9)
axes.text(5.5, 2.5, "node 1", va="center", fontsize=9)

axes.set(xlim=(-0.05, 5.95), ylim=(3.7, -0.95))
print(plots.save(axes.figure, Path(__file__).with_name("one-step.png")).name)
