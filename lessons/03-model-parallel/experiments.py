"""The longer experiments of lesson 03: steps of a split model on virtual GPUs.

The tensors have shapes but no numbers (`compute=False`). That is enough to simulate memory and
time.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

from multigpu import launch, plots, vgpu

MIB = 2**20
FREE_LINK = vgpu.Link("free link", bandwidth=1e18, latency=0.0)


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The optimizer of the lesson."""
    return torch.optim.SGD(weights, 0.05, momentum=0.9)


def shares(timeline: vgpu.Timeline) -> dict[str, float]:
    """Timeline.breakdown, as the mean of all lanes."""
    lanes = [timeline.breakdown(lane) for lane in range(len(timeline.lanes))]
    return {part: sum(lane[part] for lane in lanes) / len(lanes) for part in lanes[0]}


def timed_step(
    step: Callable,
    model: nn.Module,
    first: torch.device,
    last: torch.device,
    batch: int,
    micro_batches: int,
) -> tuple[float, vgpu.Timeline]:
    """The simulated seconds and the timeline of the second training step.

    step           the lesson's step(model, optimizer, images, labels, micro_batches)
    first, last    the GPUs of the images, (batch, 1, 28, 28), and of the labels
    """
    optimizer = sgd(model.parameters())
    images = torch.empty(batch, 1, 28, 28, device=first)
    labels = torch.empty(batch, dtype=torch.long, device=last)
    for _ in range(2):  # the first step warms up
        began = vgpu.elapsed()
        step(model, optimizer, images, labels, micro_batches)
    return vgpu.elapsed() - began, vgpu.timeline(since=began)


def pipelined_step(
    pipeline: object, world: launch.World, gpu: torch.device, batch: int
) -> tuple[float, vgpu.Timeline]:
    """This rank's peak memory in MiB and its timeline in the pipeline's second step.

    Every rank of `world` calls this function. The first rank has the images,
    (batch, 1, 28, 28), the last one the labels. `pipeline` is a schedule of
    torch.distributed.pipelining.
    """
    images = torch.empty(batch, 1, 28, 28, device=gpu)
    labels = torch.empty(batch, dtype=torch.long, device=gpu)
    inputs = (images,) if world.rank == 0 else ()
    target = labels if world.rank == world.size - 1 else None
    for _ in range(2):  # the first step warms up
        dist.barrier()  # all ranks begin the step at the same time
        torch.vgpu.reset_peak_memory_stats(gpu)
        began = vgpu.elapsed()
        pipeline.step(*inputs, target=target)
    return torch.vgpu.max_memory_allocated(gpu) / MIB, vgpu.timeline(since=began)


def print_schedules(
    timelines: dict[str, vgpu.Timeline], peaks: dict[str, list[float]]
) -> None:
    """Print for each schedule a step's simulated time, each rank's idle share and peak MiB."""
    for name, timeline in timelines.items():
        milliseconds = 1e3 * (timeline.end - timeline.start)
        idle = ", ".join(f"{timeline.idle(rank):.0%}" for rank in range(len(timeline.lanes)))
        peak = ", ".join(f"{mib:.0f}" for mib in peaks[name])
        step = f"{milliseconds:.2f} ms simulated"
        print(f"{name}: {step}; by rank: idle {idle}, peak MiB {peak}")


def draw_peaks(peaks: dict[str, list[float]], label: str) -> Figure:
    """Draw peaks[schedule][rank], in MiB, as bars. The title is true for gpipe and 1f1b."""
    bars = {}
    for rank in range(min(len(mib) for mib in peaks.values())):
        for name, mib in peaks.items():
            bars[f"{name}, rank {rank}"] = {"peak": mib[rank]}
    unit = f"peak of all memory, MiB ({label})"
    return plots.stacked_bars(bars, unit, "1F1B holds fewer micro-batches at a time")
