"""Draws restart.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/12-elastic/picture.py
"""

from pathlib import Path

from multigpu import plots
from multigpu.plots import arrow, box

title = "All ranks start again, and go on from the last checkpoint"
axes = plots.schematic(["torchrun", "rank 0", "rank 1", "checkpoints"], title)

box(axes, "idle", 0, 0, 3.2, "watches")
box(axes, "update", 3.2, 0, 0.9, "starts both")
box(axes, "idle", 4.1, 0, 3.9, "watches")
for lane in (1, 2):
    for index in range(2):
        steps = f"steps\n{10 * index} … {10 * index + 9}"
        box(axes, "compute", 1.1 * index, lane, 1.1, steps)
    box(axes, "data", 4.1, lane, 1.1, "load 20")
    box(axes, "compute", 5.2, lane, 1.4, "steps 20 … 29")
    box(axes, "compute", 6.6, lane, 1.4, "30 … 39")
box(axes, "backward", 2.2, 1, 0.9, "20 … 23,\nlost")
box(axes, "backward", 2.2, 2, 0.75, "20 … 23")
axes.text(3.0, 1.85, "SIGKILL", color=plots.RED, fontsize=8, va="center")
for step, x in ((10, 1.1), (20, 2.2), (30, 6.6)):
    arrow(axes, (x, 1.27), (x, 2.72))
    box(axes, "files", x - 0.25, 3, 0.5, str(step))
arrow(axes, (2.5, 2.9), (4.2, 1.3))

axes.set_xlim(-0.05, 8.1)
print(plots.save(axes.figure, Path(__file__).with_name("restart.png")).name)
