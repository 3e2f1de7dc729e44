"""Draws spawn.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/04-ddp-spawn/picture.py
"""

from pathlib import Path

from multigpu import plots
from multigpu.plots import arrow, box

title = "The parent starts the ranks and waits; their result is in a file"
axes = plots.schematic(["parent", "rank 0", "rank 1"], title)


def label(x: float, y: float, text: str) -> None:
    axes.text(x, y, text, fontsize=8, ha="left", va="center")


box(axes, "data", 0, 0, 1.4, "check the\noptions")
waits = "waits; holds the store through which the ranks find each other"
box(axes, "idle", 1.4, 0, 6.2, waits)
for row in (1, 2):
    box(axes, "data", 1.9, row, 1.3, "import torch,\nread data")
    text = f"train with its half of each batch, as rank {row - 1}"
    box(axes, "compute", 3.2, row, 3.1, text)
box(axes, "files", 6.3, 1, 1.3, "save\nmodel.pt")

arrow(axes, (1.5, 0.27), (1.9, 0.75))
arrow(axes, (1.5, 0.27), (1.9, 1.75))
label(0.55, 1.25, "args, pickled")
for step in range(4):
    x = 3.9 + 0.7 * step
    arrow(axes, (x, 1.27), (x, 1.73), "<->", plots.GREEN, 2)
label(6.15, 1.5, "gradients, averaged")

axes.set_xlim(-0.05, 7.7)
print(plots.save(axes.figure, Path(__file__).with_name("spawn.png")).name)
