"""The longer experiments of lesson 06: training steps on virtual GPUs, shapes only."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu import launch, vgpu
from multigpu.models import CNN

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

MIB = 2**20
GIB = 2**30
# The course's CNN with a wide hidden layer and many classes: fc1 has 564 million weights, fc2
# has 540 million. A cut between them halves the weights and the arithmetic.
BIG = {"image_shape": (1, 28, 28), "hidden": 90_000, "classes": 6_000}
CUT = 3
MICRO_BATCHES = 4
# Images of one step, over all GPUs. One pipeline alone takes half of them.
IMAGES = 8_192
# Two nodes with two V100 each. Every rank sees all four GPUs and takes its own.
LAYOUTS = {
    "four replicas": lambda gpus, rank: [gpus[rank]],
    "stages inside nodes": lambda gpus, rank: gpus[2 * rank : 2 * rank + 2],
    "stages across nodes": lambda gpus, rank: gpus[rank::2],
    "one pipeline, one node": lambda gpus, rank: gpus[:2],
}


class Step(NamedTuple):
    """One training step of a rank.

    seconds   simulated; None if it did not fit
    images    the images of the step, over all ranks
    peak      the most GiB on each of the rank's GPUs
    error     the text of the OutOfMemoryError, or ""
    """

    seconds: float | None
    images: int
    peak: list[float]
    error: str


def layout_steps(cases: list[tuple[str, str]]) -> list[Step]:
    """In each rank: the third step with Adam for each case (a layout, the link of the nodes).

    A layout is one of LAYOUTS. Run it with launch.call, in as many processes as the layouts
    have ranks: four for "four replicas", one for "one pipeline, one node", otherwise two.
    """
    world = launch.find_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    steps = []
    for number, (layout, between) in enumerate(cases):
        with vgpu.running(4, gpus_per_node=2, between_nodes=between, compute=False) as gpus:
            dist.init_process_group(
                "vgpu",
                store=dist.PrefixStore(str(number), store),
                rank=world.rank,
                world_size=world.size,
            )
            steps.append(_third_step(LAYOUTS[layout](gpus, world.rank), world.size))
            dist.destroy_process_group()
    return steps


def _third_step(gpus: list[torch.device], ranks: int) -> Step:
    # Imported here, because the path needs the scripts' folder first.
    from PT_CNN_HybridParallel import Halves

    first, last = gpus[0], gpus[-1]
    images = IMAGES if ranks > 1 else IMAGES // 2
    seconds, error = None, ""
    try:
        with torch.device("meta"):
            if len(gpus) == 1:
                model = CNN(**BIG).to(first)
            else:
                model = Halves(first, last, MICRO_BATCHES, **BIG, cut=CUT)
        if ranks > 1:
            # Without its own copy of the gradients DDP needs less memory.
            model = DDP(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters())
        inputs = torch.empty(images // ranks, 1, 28, 28, device=first)
        labels = torch.empty(images // ranks, dtype=torch.long, device=last)
        for _ in range(3):
            began = vgpu.elapsed()
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        seconds = vgpu.elapsed() - began
    except torch.OutOfMemoryError as failure:
        error = str(failure)
    peak = [torch.vgpu.max_memory_allocated(gpu) / GIB for gpu in gpus]
    return Step(seconds, images, peak, error)


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
