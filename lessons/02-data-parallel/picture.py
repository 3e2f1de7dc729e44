"""Draws one-step.png, the picture on this page, from a simulation.

python lessons/02-data-parallel/picture.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from experiments import carried
from torch import nn

from multigpu import vgpu
from multigpu.models import CNN

with vgpu.running(2, compute=False) as gpus:
    model = nn.DataParallel(CNN((1, 28, 28)).to(gpus[0]), gpus)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(1024, 1, 28, 28)
    # The labels are on the GPU before the step, so each transfer of inputs carries images.
    labels = torch.empty(1024, dtype=torch.long, device=gpus[0])
    for _ in range(2):  # the first step warms up
        began = vgpu.elapsed()
        optimizer.zero_grad()
        F.cross_entropy(model(images.to(gpus[0])), labels).backward()
        optimizer.step()
    timeline = vgpu.timeline(since=began)

notes = [timeline.notes.get(event) for event in timeline.events]
assert notes.count("weights") == 1
assert notes.count("inputs") == 2  # from the host to GPU 0, and from there to GPU 1
title = f"A step sends images and weights to GPU 1, which is busy {timeline.busy(1):.0%} "
title += "of the time"
path = Path(__file__).with_name("one-step.png")
print(timeline.plot(path, title, contents=carried(timeline)).name)
