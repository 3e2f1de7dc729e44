"""The longer experiment of lesson 06: a training step of one replica on virtual GPUs."""

import torch
import torch.nn.functional as F
from torch import nn

from multigpu import vgpu

MIB = 2**20


def third_step(
    model: nn.Module, first: torch.device, last: torch.device, batch: int
) -> tuple[float, list[dict[str, float]], vgpu.Timeline]:
    """The third training step of this rank, with `batch` images of 28×28.

    Returns three values: the simulated seconds; for each of the rank's GPUs, the MiB by use
    between forward and backward; the timeline. `first` is the GPU of the images, `last` the
    GPU of the labels.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(batch, 1, 28, 28, device=first)
    labels = torch.empty(batch, dtype=torch.long, device=last)
    for _ in range(3):
        began = vgpu.elapsed()
        optimizer.zero_grad(set_to_none=False)  # keeps the gradients' memory, for the bars
        loss = F.cross_entropy(model(images), labels)
        held = vgpu.memory_held(model, optimizer)
        loss.backward()
        optimizer.step()
    mebibytes = [{part: size / MIB for part, size in use.items()} for use in held.values()]
    return vgpu.elapsed() - began, mebibytes, vgpu.timeline(since=began)
