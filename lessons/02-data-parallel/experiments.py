"""The longer experiments of lesson 02: memory, what a step carries, speed-ups over one GPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import multigpu
from multigpu.models import CNN

MIB = 2**20
IMAGE = (1, 28, 28)
BATCHES = [2**k for k in range(6, 17, 2)]
# GPU and link of the sweeps, by the name of the curve.
MACHINES = {
    "V100, NVLink2": ("V100-16GB", "NVLink2"),
    "V100, PCIe3": ("V100-16GB", "PCIe3"),
    "H100, NVLink4": ("H100-80GB", "NVLink4"),
}


def carried(timeline: multigpu.Timeline) -> Callable[[Any], str]:
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


class Training:
    """Steps of a CNN on images of 28×28 from the host, with SGD.

    With `parallel` all GPUs compute: by nn.DataParallel or, if this process is a rank, by DDP,
    with an equal part of the batch on each rank's GPU. Otherwise the first GPU computes alone.
    """

    def __init__(self, gpus: list[torch.device], batch: int, parallel: bool = True):
        self.gpu = gpus[0]
        self.model: nn.Module = CNN(IMAGE).to(self.gpu)
        if parallel and dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
            batch = -(-batch // dist.get_world_size())
        elif parallel:
            self.model = nn.DataParallel(self.model, gpus)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.images = torch.zeros(batch, *IMAGE)
        # The labels are on the GPU already, so a step sends images only.
        self.labels = torch.zeros(batch, dtype=torch.long, device=self.gpu)

    def forward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return F.cross_entropy(self.model(self.images.to(self.gpu)), self.labels)

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()

    def timeline(self) -> multigpu.Timeline:
        """The third step: in the second one DDP prepares its buckets."""
        for _ in range(3):
            began = multigpu.elapsed()
            self.step()
        return multigpu.timeline(since=began)


def memory_of_a_step(
    gpus: list[torch.device], batch: int
) -> tuple[dict[str, dict[str, float]], list[float]]:
    """What each GPU holds before and after backward, by use, and its peak, in MiB."""
    training = Training(gpus, batch)
    training.step()  # it makes the optimizer's state
    loss = training.forward()
    moments = {"before": multigpu.memory_held(training.model, training.optimizer)}
    loss.backward()
    moments["after"] = multigpu.memory_held(training.model, training.optimizer)
    held = {
        f"{gpu}, {moment} backward": {
            use: size / MIB for use, size in of_gpus[gpu].items() if size
        }
        for gpu in gpus
        for moment, of_gpus in moments.items()
    }
    return held, [torch.cuda.max_memory_allocated(gpu) / MIB for gpu in gpus]


def seconds(gpus: list[torch.device], batch: int, parallel: bool) -> float:
    """The simulated seconds of one training step with `batch` images."""
    step = Training(gpus, batch, parallel).timeline()
    return step.end - step.start


def speedup(gpus: list[torch.device], batch: int) -> float:
    """How many times as fast all GPUs are as the first one alone."""
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


def sweep(count: int = 2) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Speed-ups by machine over BATCHES, and each machine's break-even; prints both.

    It also prints what the first GPU's time is used for in the smallest and the largest step.
    """
    speedups, limits = {}, {}
    for name, (gpu, link) in MACHINES.items():
        with multigpu.gpus(count, gpu=gpu, link=link, shapes_only=True) as gpus:
            speedups[name] = [speedup(gpus, batch) for batch in BATCHES]
            limits[name] = break_even(gpus)
            shown = zip(BATCHES, speedups[name], strict=True)
            print(f"{name}: as fast as one GPU at a batch of {limits[name]:,}")
            print("    " + ", ".join(f"{batch:,}: {faster:.2f}×" for batch, faster in shown))
            for batch in (BATCHES[0], BATCHES[-1]):
                used = Training(gpus, batch).timeline().breakdown(gpus[0])
                shares = [f"{part} {share:.0%}" for part, share in used.items() if share]
                print(f"    first GPU, batch of {batch:,}: {', '.join(shares)}")
    return speedups, limits


def ddp() -> tuple[multigpu.Timeline, list[float], int]:
    """As one of two ranks with V100s: a step of 256 images, times of BATCHES, break-even."""
    gpus = multigpu.gpus(2, gpu="V100-16GB", link="NVLink2", shapes_only=True)
    dist.init_process_group("nccl")
    gpu = gpus[dist.get_rank()]
    torch.cuda.set_device(gpu)
    step = Training([gpu], 256).timeline()
    times = [seconds([gpu], batch, parallel=True) for batch in BATCHES]
    return step, times, break_even([gpu], precision=10)


def compare_times(of_ddp: list[float]) -> dict[int, tuple[float, float, float]]:
    """The ms of a step on a V100, with DataParallel and DDP on two, by batch; prints them."""
    times = {}
    with multigpu.gpus(2, gpu="V100-16GB", link="NVLink2", shapes_only=True) as gpus:
        for batch, in_ddp in zip(BATCHES, of_ddp, strict=True):
            alone, both = (seconds(gpus, batch, parallel) for parallel in (False, True))
            times[batch] = (1e3 * alone, 1e3 * both, 1e3 * in_ddp)
            print(
                f"{batch:,} images, ms per step: one GPU {times[batch][0]:.2f}, DataParallel "
                f"{times[batch][1]:.2f}, DDP {times[batch][2]:.2f}"
            )
    return times
