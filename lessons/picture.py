"""Draws four-ways.png, the picture on the front page: one step of four routes on two GPUs: python lessons/picture.py"""

import sys
from pathlib import Path

import torch
from torch import nn

from multigpu import launch, plots, vgpu
from multigpu.files import atomic
from multigpu.models import CNN

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
BATCH, WIDE = 4096, {"image_shape": (1, 28, 28), "hidden": 320}


def third_step(model: nn.Module, first: torch.device, last: torch.device, batch: int = BATCH, pieces: int = 1):
    """The timeline of a step whose images are on the first device and whose outputs are on the last."""
    from PT_CNN_ModelParallel import step

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    images, labels = torch.empty(batch, 1, 28, 28, device=first), torch.empty(batch, dtype=torch.long, device=last)
    for _ in range(3):
        began = vgpu.elapsed()
        step(model, optimizer, images, labels, pieces)
    return vgpu.timeline(since=began)


def data_parallel() -> vgpu.Timeline:
    with vgpu.running(2, compute=False) as places:
        return third_step(nn.DataParallel(CNN(**WIDE).to(places[0]), places), places[0], places[0])


def halves(pieces: int) -> vgpu.Timeline:
    from PT_CNN_ModelParallel import Halves

    with vgpu.running(2, compute=False) as (first, second):
        return third_step(Halves(first, second, **WIDE), first, second, pieces=pieces)


def one_rank_of_ddp() -> vgpu.Timeline:
    (place,) = vgpu.start(1, compute=False)
    torch.distributed.init_process_group("vgpu")
    return third_step(nn.parallel.DistributedDataParallel(CNN(**WIDE).to(place)), place, place, BATCH // 2)


if __name__ == "__main__":
    ways = {
        "DataParallel: one process deals out images and weights": data_parallel(),
        "Model parallelism, naive: half of the layers each": halves(1),
        "The same in four pieces": halves(4),
        "DDP: a process a GPU, all-reduce of the gradients": vgpu.Timeline.of_ranks(launch.call(one_rank_of_ddp, 2)),
    }
    figure = plots.figure(8, 6)
    for row, (title, timeline) in enumerate(ways.items()):
        timeline.plot(figure.add_subplot(len(ways), 1, row + 1), title=title)
    for axes in figure.axes[1:-1]:
        axes.get_legend().remove()
        axes.set_title(axes.get_title(), pad=6)
    for axes in figure.axes[:-1]:
        axes.set_xlabel(" ")
    for axes in figure.axes:
        axes.set_xlim(0, max(other.get_xlim()[1] for other in figure.axes))  # one scale
    with atomic(Path(__file__).with_name("four-ways.png")) as temporary:
        figure.savefig(temporary, format="png")
