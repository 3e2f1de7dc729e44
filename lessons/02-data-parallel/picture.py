"""Draws two-steps.png, the picture on this page, from a simulation.

python lessons/02-data-parallel/picture.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from multigpu import vgpu
from multigpu.models import CNN

with vgpu.running(2, compute=False) as gpus:
    model = nn.DataParallel(CNN((1, 28, 28)).to(gpus[0]), gpus)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(1024, 1, 28, 28)
    labels = torch.empty(1024, dtype=torch.long)
    for step in range(3):
        if step == 1:  # the first step warms up
            began = vgpu.elapsed()
        optimizer.zero_grad()
        F.cross_entropy(model(images.to(gpus[0])), labels.to(gpus[0])).backward()
        optimizer.step()

    path = Path(__file__).with_name("two-steps.png")
    title = "Two steps, batch 1,024: GPU 1 waits for its images, and while GPU 0 updates"
    print(vgpu.timeline(since=began).plot(path, title=title).name)
