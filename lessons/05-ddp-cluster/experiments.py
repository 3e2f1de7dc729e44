"""The longer experiments of lesson 05. Ranks run them: `launch.call(function, 2, …)`.

BatchNorm and clipping run without ranks, too: then they are the serial run.
"""

import difflib
import socket
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import multigpu
from multigpu import data, launch
from multigpu.models import CNN

FOLDER = Path(__file__).parent
COPIES = "bucket copies"  # the part of a timeline's picture, and the note at its events


def free_port() -> int:
    """A port of this machine that no program uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def changed_lines(before: Path | str, after: Path | str) -> list[str]:
    """The lines that differ between two files of text, with - (before) and + (after)."""
    old, new = (Path(path).read_text().splitlines() for path in (before, after))
    changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    return [line for line in changes if not line.startswith("@@")]


def largest_difference(path: Path | str, other: Path | str) -> float:
    """The largest difference between the weights in two files."""
    weights, others = (torch.load(file, map_location="cpu") for file in (path, other))
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


# ---- when the gradients are sent: simulated -------------------------------------------------


def simulated_steps(
    cases: list[tuple[float, int, bool]], batch: int = 256, link: str = "PCIe3"
) -> list[multigpu.Timeline]:
    """Timelines of two ranks: one training step with DDP on two virtual V100s for each case.

    A case has three values: the size in MiB at which a bucket of gradients is full; the number
    of micro-batches of `batch` images of 28×28 in the step; whether `no_sync` delays the
    all-reduce to the last micro-batch. `link` joins the GPUs.
    """
    of_ranks = launch.call(_steps_of_a_rank, 2, cases, batch, link)
    return [multigpu.Timeline.of_ranks(list(step)) for step in zip(*of_ranks, strict=True)]


def _steps_of_a_rank(
    cases: list[tuple[float, int, bool]], batch: int, link: str
) -> list[multigpu.Timeline]:
    timelines = []
    with multigpu.gpus(2, gpu="V100-16GB", link=link, shapes_only=True) as gpus:
        dist.init_process_group("nccl")
        gpu = gpus[dist.get_rank()]
        torch.cuda.set_device(gpu)
        for bucket_mb, micro_batches, delayed in cases:
            ddp = DDP(CNN((1, 28, 28)).to(gpu), bucket_cap_mb=bucket_mb)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
            for _ in range(3):  # the first step warms up; after it DDP makes its buckets again
                dist.barrier(device_ids=[gpu.index])
                began = multigpu.elapsed()
                _forward_and_backward(ddp, batch, micro_batches, delayed)
                optimizer.step()
                optimizer.zero_grad()
            timelines.append(multigpu.timeline(since=began))
            _note_buckets(timelines[-1], 1 if delayed else micro_batches)
            del ddp  # before its group: DDP can hang if it drops the last reference
        dist.destroy_process_group()
    return timelines


def milliseconds(step: multigpu.Timeline) -> float:
    """How long a step takes, simulated."""
    return 1e3 * (step.end - step.start)


def _forward_and_backward(ddp: DDP, batch: int, micro_batches: int, delayed: bool) -> None:
    gpu = next(ddp.parameters()).device
    images = torch.empty(batch, 1, 28, 28, device=gpu)
    labels = torch.zeros(batch, dtype=torch.long, device=gpu)
    for micro_batch in range(micro_batches):
        is_last = micro_batch == micro_batches - 1
        with nullcontext() if is_last or not delayed else ddp.no_sync():
            F.cross_entropy(ddp(images), labels).backward()


def _note_buckets(timeline: multigpu.Timeline, rounds: int) -> None:
    """Note the copies, and each all-reduce's bucket, of `rounds` averages of all buckets."""
    collectives = [event for event in timeline.events if event.kind == "collective"]
    for index, event in enumerate(collectives):
        timeline.notes[event] = f"bucket {index % (len(collectives) // rounds) + 1}"
    for event in timeline.events:
        # DDP writes a gradient ÷ ranks into its bucket, and copies the average out of it. The
        # model's own backward has no such kernels.
        if event.phase == "backward" and event.name in ("mul", "copy_"):
            timeline.notes[event] = COPIES


def all_reduces(timeline: multigpu.Timeline, lane: int = 0) -> int:
    """The number of all-reduces in which the GPU of `lane` takes part."""
    return sum(
        event.kind == "collective" and event.device == lane for event in timeline.events
    )


def hidden(timeline: multigpu.Timeline, lane: int = 0) -> float:
    """The fraction of the all-reduces' time in which the GPU of `lane` also computes.

    The copies into the buckets and out of them do not count: without DDP there are none.
    """
    work = [event for event in timeline.events if timeline.notes.get(event) != COPIES]
    step = multigpu.Timeline(
        work, timeline.lanes, timeline.start, timeline.end, timeline.label
    )
    return step.overlap(lane) / step.busy(lane, "collective")


# ---- BatchNorm ------------------------------------------------------------------------------


class AllReduce(torch.autograd.Function):
    """The sum over the ranks. Each rank's sum depends on all inputs, so backward adds, too."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SyncedBatchNorm(nn.BatchNorm1d):
    """BatchNorm with the mean and the variance of all ranks' rows, (rows, features).

    For training only. nn.SyncBatchNorm does the same on GPUs.
    """

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([torch.ones_like(rows), rows, rows.square()]).sum(1)
        count, total, squares = AllReduce.apply(sums)
        mean = total / count
        variance = squares / count - mean.square()
        with torch.no_grad():
            unbiased = variance * count / (count - 1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        return (rows - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def batch_norm_steps(
    norms: list[type[nn.BatchNorm1d]], batch: int = 64
) -> list[dict[str, torch.Tensor]]:
    """One forward and backward pass with each kind of BatchNorm, on this rank's images.

    Returns for each kind the gradient, averaged over the ranks, as one vector; this rank's
    running mean; and the running mean after another forward pass, in eval mode, which does not
    update it. Without ranks, they are those of the whole batch.
    """
    world = _join()
    train, _ = data.load(data.fetch(None))
    shard = slice(world.rank, batch, world.size)
    images = train.tensors[0][shard].flatten(1)
    labels = train.tensors[1][shard]
    results = []
    for norm in norms:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), norm(32), nn.Tanh(), nn.Linear(32, 10))
        wrapped = DDP(model) if world.size > 1 else model
        F.cross_entropy(wrapped(images), labels).backward()
        running_mean = model[1].running_mean.clone()
        with torch.no_grad():
            wrapped.eval()(images)
        results.append(
            {
                "gradient": _vector(model),
                "running mean": running_mean,
                "next running mean": model[1].running_mean,
            }
        )
        del wrapped  # before its group: DDP can hang if it drops the last reference
    _leave(world)
    return results


# ---- clipping -------------------------------------------------------------------------------


def clipped_gradients(limit: float, rows: int = 11) -> dict[str, torch.Tensor]:
    """The gradient of a batch of `rows` images, its norm clipped to `limit`, in two ways.

    "after" clips the average over the ranks, "before" clips each rank's own gradient. "norm"
    is the average's norm before it is clipped. Without ranks both are the same.
    """
    world = _join()
    train, _ = data.load(data.fetch(None))
    shard = slice(world.rank, rows, world.size)
    images, labels = train[shard]
    torch.manual_seed(0)
    model = CNN()
    wrapped = DDP(model) if world.size > 1 else model
    gradients = {}
    for when in ("after", "before"):
        model.zero_grad()
        with wrapped.no_sync() if when == "before" and world.size > 1 else nullcontext():
            # The mean over all images, also in uneven shards: DDP divides by the ranks.
            loss = F.cross_entropy(wrapped(images), labels, reduction="sum")
            (loss * world.size / rows).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        gradient = _vector(model)
        if when == "after":
            gradients["norm"] = norm
        elif world.size > 1:
            dist.all_reduce(gradient)
            gradient /= world.size
        gradients[when] = gradient
    del wrapped  # before its group: DDP can hang if it drops the last reference
    _leave(world)
    return gradients


def _join() -> launch.World:
    world = launch.find_world()
    if world.size > 1:
        dist.init_process_group("gloo")
    return world


def _leave(world: launch.World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def _vector(model: nn.Module) -> torch.Tensor:
    """The model's gradients as one vector, a copy."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])
