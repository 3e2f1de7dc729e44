"""Draws micro-batches.png, the picture on this page, from a simulation.

python lessons/03-model-parallel/picture.py
"""

import sys
from pathlib import Path

from experiments import timed_step

from multigpu import plots, vgpu

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PT_CNN_ModelParallel import Halves, step

TITLES = {
    1: "Naive: one GPU works, the other waits for it",
    4: "Four micro-batches: both work, but not at the start and the end",
}

figure = plots.figure(8, 4.4)
for row, (micro_batches, title) in enumerate(TITLES.items()):
    with vgpu.running(2, compute=False) as (first, second):
        model = Halves(first, second, (1, 28, 28), hidden=320)
        _, timeline = timed_step(step, model, first, second, 4096, micro_batches)
        axes = figure.add_subplot(2, 1, row + 1)
        timeline.plot(axes, title=title)

longest = max(axes.get_xlim()[1] for axes in figure.axes)
for axes in figure.axes:
    axes.set_xlim(0, longest)  # one time scale for both
print(plots.save(figure, Path(__file__).with_name("micro-batches.png")).name)
