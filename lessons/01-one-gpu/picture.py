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

# For each phase, the picture shows the smallest median of this number of epochs, because other
# programs can only make a phase slower.
REPEATS = 40


def epoch(train: torch.utils.data.Dataset) -> dict[str, float]:
    """The seconds of each phase of a step of 64 images, in one epoch of a new model."""
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return phases(model, optimizer, loader_of(train, 64, seed=0), warm_up=1)


torch.set_num_threads(1)
train, _ = data.load(data.fetch(None))
epochs = [epoch(train) for _ in range(REPEATS)]
one_gpu = {part: 1e3 * min(seconds[part] for seconds in epochs) for part in epochs[0]}
halved = {part: one_gpu[part] / 2 for part in ("forward", "backward")}
bars = {"one GPU": one_gpu, "two GPUs, at best": one_gpu | halved}

unit = "ms per step of 64 images; the first bar is measured, on one CPU core"
computing = (one_gpu["forward"] + one_gpu["backward"]) / sum(one_gpu.values())
title = f"A second GPU shares forward and backward: {computing:.0%} of this step"
figure = plots.stacked_bars(bars, unit, title)
print(plots.save(figure, Path(__file__).with_name("where-the-time-goes.png")).name)
