"""Draws where-the-time-goes.png, the picture on this page: a schematic, nothing is measured.

python lessons/01-one-gpu/picture.py
"""

from pathlib import Path

from multigpu import plots

one_gpu = {"data": 2, "forward": 2, "backward": 2, "update": 2}
bars = {"one GPU": one_gpu, "two GPUs, at best": one_gpu | {"forward": 1, "backward": 1}}
title = "A second GPU shares forward and backward"
figure = plots.stacked_bars(bars, "time of a step, not to scale", title)
(axes,) = figure.axes
axes.set_xticks([])
for text in axes.texts:
    text.set_text(text.get_text().partition(" ")[0])  # without the percentage
print(plots.save(figure, Path(__file__).with_name("where-the-time-goes.png")).name)
