"""Measures the phases of a step; draws where-the-time-goes.png, the picture on this page.

python lessons/01-one-gpu/picture.py
"""

import sys
from pathlib import Path

import torch

from multigpu import data, plots
from multigpu.models import CNN

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PT_CNN_SingleGPU import loader_of, phases

BATCHES = (16, 32, 64, 128)
# For each phase, the picture shows the smallest median of this number of epochs, because other
# programs can only make a phase slower. The batch sizes take turns.
REPEATS = 40


def epoch(batch_size: int) -> dict[str, float]:
    """The seconds of each phase of a step, in one epoch of a new model."""
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return phases(model, optimizer, loader_of(train, batch_size, seed=0), warm_up=1)


torch.set_num_threads(1)
train, _ = data.load(data.fetch(None))
bars = {}
epochs = [{batch_size: epoch(batch_size) for batch_size in BATCHES} for _ in range(REPEATS)]
for batch_size in BATCHES:
    medians = [seconds[batch_size] for seconds in epochs]
    microseconds = {
        phase: min(1e6 * seconds[phase] / batch_size for seconds in medians)
        for phase in medians[0]
    }
    bars[f"batch {batch_size}"] = microseconds

unit = "µs per image, measured on one CPU core"
step = bars["batch 64"]
computing = (step["forward"] + step["backward"]) / sum(step.values())
title = f"Batch 64: forward and backward take {computing:.0%} of a step"
figure = plots.stacked_bars(bars, unit, title)
print(plots.save(figure, Path(__file__).with_name("where-the-time-goes.png")).name)
