"""Draws micro-batches.png, the picture on this page, from a simulation.

python lessons/03-model-parallel/picture.py
"""

import sys
from pathlib import Path

from experiments import WIDE, timed_step

import multigpu
from multigpu import models, plots

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PT_CNN_ModelParallel import Halves, step


def simulate(micro_batches: int) -> multigpu.Timeline:
    """A step of 4,096 images; the micro-batches are numbered."""
    with multigpu.gpus(2, shapes_only=True) as (first, second):
        model = Halves(models.CNN(**WIDE), first, second)
        _, timeline = timed_step(step, model, first, second, 4096, micro_batches)
        return timeline


naive = simulate(1)
pipelined = simulate(4)
until = naive.end - naive.start
assert pipelined.end - pipelined.start < until
figure = plots.figure(8, 4.8)
top = figure.add_subplot(2, 1, 1)
bottom = figure.add_subplot(2, 1, 2)
# The notebook asks for the shares of the time and for the times.
naive.plot(top, "Naive", until=until, shares=False)
pipelined.plot(bottom, "Four micro-batches", until=until, shares=False)
for axes in (top, bottom):
    axes.set_xticks([])
    axes.set_xlabel("simulated time, one scale", loc="left")
plots.share_legend(figure)
print(plots.save(figure, Path(__file__).with_name("micro-batches.png")).name)
