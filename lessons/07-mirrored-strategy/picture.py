"""Draws mirrored.png, the picture on this page: a schematic, nothing in it is measured.

python lessons/07-mirrored-strategy/picture.py
"""

from pathlib import Path

from multigpu import plots
from multigpu.plots import arrow, box

rows = ["tf.data, on the CPU", "replica 0", "replica 1"]
title = "One process: each replica updates its own copy of the weights, by the same sum"
axes = plots.schematic(rows, title, height=3.4)

box(axes, "data", 0, 0, 1.4, "read batch 1:\n64 images")
for step in (1, 2):
    left = 1.6 + 3.8 * (step - 1)
    text = "read batch 2,\nahead of its step" if step == 1 else "read batch 3:\n64 images"
    box(axes, "data", left, 0, 1.4, text)
    for row in (1, 2):
        box(axes, "compute", left, row, 1.9, f"forward, backward:\n32 images, step {step}")
        box(axes, "update", left + 2.5, row, 1.1, "update its\ncopy")
        arrow(axes, (left - 0.2, 0.27), (left, row - 0.27))
    x = left + 2.2
    arrow(axes, (x, 2.2), (x, 0.8), "<->", plots.GREEN, 3)
    axes.text(
        x, 2.48, "all-reduce: sum\nof the gradients", fontsize=8, ha="center", va="center"
    )
axes.set(xlim=(-0.05, 9.1), ylim=(2.7, -0.4))
print(plots.save(axes.figure, Path(__file__).with_name("mirrored.png")).name)
