"""The longer experiments of lesson 02: the simulated speed-up of DataParallel over one GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from multigpu import vgpu
from multigpu.models import CNN


@contextmanager
def other_gpus(count: int, **machine: Any) -> Iterator[list[torch.device]]:
    """Run other virtual GPUs in a `with` block, in the place of those that are running.

    At its end as many V100s as before are running. Their devices are the same; tensors that
    were on them are lost. `machine` has the keywords of vgpu.running.
    """
    before = len(vgpu.devices())
    vgpu.stop()
    try:
        with vgpu.running(count, **machine) as gpus:
            yield gpus
    finally:
        if before:
            vgpu.start(before)


def seconds(gpus: list[torch.device], batch: int, parallel: bool) -> float:
    """The simulated seconds of one training step with `batch` images of 28×28.

    With `parallel` all GPUs compute, by nn.DataParallel; otherwise the first one alone.
    """
    model = CNN((1, 28, 28)).to(gpus[0])
    forward = nn.DataParallel(model, gpus) if parallel else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(batch, 1, 28, 28, device=gpus[0])
    labels = torch.zeros(batch, dtype=torch.long, device=gpus[0])
    for _ in range(2):  # the first step warms up
        began = vgpu.elapsed()
        optimizer.zero_grad()
        F.cross_entropy(forward(images), labels).backward()
        optimizer.step()
    return vgpu.elapsed() - began


def breakdown(gpus: list[torch.device], batch: int) -> dict[str, float]:
    """What the first GPU's time in a step of DataParallel is used for, as fractions.

    {"compute": …, "transfer": …, "bubble": …, "launch": …}, as of vgpu.Timeline.breakdown.
    """
    duration = seconds(gpus, batch, parallel=True)
    return vgpu.timeline(since=vgpu.elapsed() - duration).breakdown(gpus[0])


def speedup(gpus: list[torch.device], batch: int) -> float:
    """How many times as fast DataParallel on `gpus` is as the first GPU alone."""
    return seconds(gpus, batch, parallel=False) / seconds(gpus, batch, parallel=True)


def break_even(gpus: list[torch.device], precision: int = 50) -> int:
    """The smallest batch at which DataParallel is as fast as one GPU, to `precision` images.

    Raises ValueError if it is slower at a batch of 65,536.
    """
    too_small, enough = 0, 65_536
    if speedup(gpus, enough) < 1:
        raise ValueError(f"DataParallel is slower than one GPU at a batch of {enough:,}.")
    while enough - too_small > precision:
        middle = (too_small + enough) // 2
        if speedup(gpus, middle) >= 1:
            enough = middle
        else:
            too_small = middle
    return round(enough / precision) * precision
