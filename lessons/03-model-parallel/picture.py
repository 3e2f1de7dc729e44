"""Draws pieces.png, the picture on this lesson's page: python lessons/03-model-parallel/picture.py"""

import sys
from pathlib import Path

import torch

from multigpu import plots, vgpu

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from PT_CNN_ModelParallel import Halves, step

titles = {
    1: "Naive: one GPU works, the other waits for it",
    4: "Four pieces: both work, but not at the start and the end",
}
figure = plots.figure(8, 4.4)
for row, (pieces, title) in enumerate(titles.items()):
    with vgpu.running(2, compute=False) as (first, second):
        model = Halves(first, second, (1, 28, 28), hidden=320)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images = torch.empty(4096, 1, 28, 28, device=first)
        labels = torch.empty(4096, dtype=torch.long, device=second)
        for _ in range(2):
            began = vgpu.elapsed()
            step(model, optimizer, images, labels, pieces)
        axes = figure.add_subplot(2, 1, row + 1)
        vgpu.timeline(since=began).plot(axes, title=title)
for axes in figure.axes:
    axes.set_xlim(0, max(other.get_xlim()[1] for other in figure.axes))  # one scale
print(plots.save(figure, Path(__file__).with_name("pieces.png")).name)
