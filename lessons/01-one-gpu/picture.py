"""Measures and draws where-the-time-goes.png, the picture on this lesson's page: python lessons/01-one-gpu/picture.py"""

import sys
from pathlib import Path

import torch

from multigpu import data, plots

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import PT_CNN_SingleGPU as lesson

torch.set_num_threads(1)
train, _ = data.load(data.fetch(None))
bars = {}
for batch in (16, 64, 256):
    model, args = lesson.CNN(), lesson.parse(["--batch-size", str(batch)])
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    spent = lesson.phases(
        model, optimizer, lesson.loader_of(train, args, 0, pin=False), warm_up=1
    )
    bars[f"batch {batch}"] = {part: 1e6 * seconds / batch for part, seconds in spent.items()}
figure = plots.stacked(
    bars,
    "µs an image, measured on one CPU core",
    "The smaller the batch, the more an image costs",
)
print(plots.save(figure, Path(__file__).with_name("where-the-time-goes.png")).name)
