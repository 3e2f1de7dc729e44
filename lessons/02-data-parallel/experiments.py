"""The longer experiments of lesson 02: what a step carries, and speed-ups over one GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multigpu import vgpu
from multigpu.models import CNN


def carried(timeline: vgpu.Timeline) -> Callable[[Any], str]:
    """A function that names what a transfer of the step carries: `contents` of Timeline.plot.

    An arrow says where it goes: ↓ to the second GPU, ↑ to the first. Images from the host have
    none. The loss is on the first GPU, so the gradients that leave it are the outputs'.
    """

    def name(event: Any) -> str:
        note = timeline.notes.get(event, "").replace("inputs", "images")
        if event.peer is None or event.peer < 0:
            return note
        down = event.peer > event.device
        if note == "gradients":
            note = "outputs' gradients" if down else "weights' gradients"
        return f"{note} {'↓' if down else '↑'}"

    return name


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
    """The simulated seconds of one training step with `batch` images of 28×28 from the host.

    With `parallel` all GPUs compute: by nn.DataParallel or, if this process is a rank, by DDP,
    with an equal part of the batch on each rank's GPU. Otherwise the first GPU computes alone.
    """
    model = CNN((1, 28, 28)).to(gpus[0])
    forward: nn.Module = model
    if parallel and dist.is_initialized():
        forward = DistributedDataParallel(model)
        batch = -(-batch // dist.get_world_size())
    elif parallel:
        forward = nn.DataParallel(model, gpus)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images = torch.empty(batch, 1, 28, 28)
    labels = torch.zeros(batch, dtype=torch.long, device=gpus[0])
    for _ in range(3):  # the first two warm up: in the second one DDP prepares its buckets
        began = vgpu.elapsed()
        optimizer.zero_grad()
        F.cross_entropy(forward(images.to(gpus[0])), labels).backward()
        optimizer.step()
    return vgpu.elapsed() - began


def breakdown(gpus: list[torch.device], batch: int) -> dict[str, float]:
    """What the first GPU's time in a step of DataParallel is used for, as fractions.

    {"compute": …, "transfer": …, "bubble": …, "launch": …}, as of vgpu.Timeline.breakdown.
    """
    duration = seconds(gpus, batch, parallel=True)
    return vgpu.timeline(since=vgpu.elapsed() - duration).breakdown(gpus[0])


def speedup(gpus: list[torch.device], batch: int) -> float:
    """How many times as fast all GPUs are as the first one alone; see `seconds`."""
    return seconds(gpus, batch, parallel=False) / seconds(gpus, batch, parallel=True)


def break_even(gpus: list[torch.device], precision: int = 50) -> int:
    """The smallest batch at which all GPUs are as fast as one, to `precision` images.

    Raises ValueError if it is slower at a batch of 65,536.
    """
    too_small, enough = 0, 65_536
    if speedup(gpus, enough) < 1:
        raise ValueError(f"All GPUs are slower than one at a batch of {enough:,}.")
    while enough - too_small > precision:
        middle = (too_small + enough) // 2
        if speedup(gpus, middle) >= 1:
            enough = middle
        else:
            too_small = middle
    return round(enough / precision) * precision
