"""The longer experiments of lesson 03: steps of a split model on virtual GPUs.

The tensors have shapes but no numbers (`shapes_only`). That is enough to simulate memory and
time.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import multigpu
from multigpu import launch, plots
from multigpu.models import CNN

MIB = 2**20
WIDE = {"image_shape": (1, 28, 28), "hidden": 320}
FREE_LINK = multigpu.Link("free link", bandwidth=1e18, latency=0.0)


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The lesson's optimizer: SGD with momentum."""
    return torch.optim.SGD(weights, 0.05, momentum=0.9)


def shares(timeline: multigpu.Timeline) -> dict[str, float]:
    """The fractions of the time that Timeline.breakdown gives, averaged over all lanes."""
    lanes = [timeline.breakdown(lane) for lane in range(len(timeline.lanes))]
    return {part: sum(lane[part] for lane in lanes) / len(lanes) for part in lanes[0]}


def timed_step(
    step: Callable,
    model: nn.Module,
    first: torch.device,
    last: torch.device,
    batch: int,
    micro_batches: int,
) -> tuple[float, multigpu.Timeline]:
    """The simulated seconds and the timeline of the second training step.

    step           the lesson's step(model, optimizer, images, labels, micro_batches)
    first, last    the GPUs of the images, (batch, 1, 28, 28), and of the labels
    """
    optimizer = sgd(model.parameters())
    images = torch.empty(batch, 1, 28, 28, device=first)
    labels = torch.empty(batch, dtype=torch.long, device=last)
    for _ in range(2):  # the first step warms up
        began = multigpu.elapsed()
        step(model, optimizer, images, labels, micro_batches)
    return multigpu.elapsed() - began, multigpu.timeline(since=began)


def on_one_gpu(batch: int = 4096) -> float:
    """The simulated seconds of a training step of the wide CNN on one GPU."""

    def step(model, optimizer, images, labels, micro_batches) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    with multigpu.gpus(1, shapes_only=True) as (gpu,):
        return timed_step(step, CNN(**WIDE).to(gpu), gpu, gpu, batch, micro_batches=1)[0]


class RankStep(NamedTuple):
    """One step of a rank in a pipeline: peak and held memory in MiB, and the timeline.

    `held` has the MiB of weights, gradients and the optimizer's state.
    """

    peak: float
    held: dict[str, float]
    timeline: multigpu.Timeline


def pipelined_steps(
    cases: list[tuple[Callable, str | list[str], str | multigpu.Link]],
    schedule: Callable,
    by_hand: tuple[Callable, Callable] | tuple[()] = (),
    micro_batches: int = 8,
    batch: int = 4096,
) -> list[RankStep]:
    """Run two steps of each case (a cut, an order, a link) on this rank.

    Returns each case's second step.

    A cut is a function such as the lesson's `stage`, which gets the wide CNN and returns the
    rank's layers. An order is a name of the lesson's `schedule`, or a list of each rank's
    order by hand, such as "F1 F2 B1 B2"; `by_hand` are the functions first_stage and
    last_stage. Run it with launch.call, in 2 processes, or in 2 to 4 if no order is by hand.
    Rank r has the virtual GPU cuda:r.
    """
    world = launch.find_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    steps = []
    for number, (cut, order, link) in enumerate(cases):
        with multigpu.gpus(world.size, link=link, shapes_only=True) as gpus:
            gpu = gpus[world.rank]
            torch.cuda.set_device(gpu)
            dist.init_process_group(
                "nccl",
                store=dist.PrefixStore(str(number), store),
                rank=world.rank,
                world_size=world.size,
            )
            layers = cut(CNN(**WIDE), world.rank, world.size).to(gpu)
            if isinstance(order, str):
                tool = schedule(order, layers, gpu, micro_batches)
                run = _with_tool(tool, world, gpu, batch)
            else:
                own = order[world.rank]
                run = _by_hand(by_hand, layers, own, world, gpu, micro_batches, batch)
            steps.append(_second_step(run, layers, gpu, micro_batches))
            dist.destroy_process_group()
    return steps


def simulated(
    cases: dict[str, tuple[Callable, str | list[str], str | multigpu.Link]],
    schedule: Callable,
    by_hand: tuple[Callable, Callable] | tuple[()] = (),
    ranks: int = 2,
    **size: int,
) -> tuple[dict[str, tuple[RankStep, ...]], dict[str, multigpu.Timeline]]:
    """Simulate a step of each case on some ranks; the arguments are those of pipelined_steps.

    Returns what each rank found, {case: (rank 0's, rank 1's, …)}, and their timelines in one,
    {case: timeline}.
    """
    by_rank = launch.call(
        pipelined_steps, ranks, list(cases.values()), schedule, by_hand, **size
    )
    steps = dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    return steps, {case: joined(each) for case, each in steps.items()}


def equal_stages(model: nn.Module, rank: int, ranks: int) -> nn.Sequential:
    """A cut whose stages compute equally long: this rank gets 16 equal linear layers."""
    layers = (nn.Linear(784, 784) for _ in range(16))
    return nn.Sequential(nn.Flatten(), *layers)


def _with_tool(
    tool: object, world: launch.World, gpu: torch.device, batch: int
) -> Callable[[], object]:
    """A function that computes all micro-batches with a schedule of torch's tool."""
    images, labels = _batch(gpu, batch)
    inputs = (images,) if world.rank == 0 else ()
    target = labels if world.rank == world.size - 1 else None
    return partial(tool.step, *inputs, target=target)


def _by_hand(
    functions: tuple[Callable, Callable],
    layers: nn.Module,
    order: str,
    world: launch.World,
    gpu: torch.device,
    micro_batches: int,
    batch: int,
) -> Callable[[], object]:
    """A function that computes all micro-batches with the lesson's functions."""
    first_stage, last_stage = functions
    images, labels = _batch(gpu, batch)
    back = dist.new_group()
    if world.rank == 0:
        return partial(first_stage, layers, order, images.chunk(micro_batches), back)
    activations = (batch // micro_batches, layers[0][0].in_features)
    return partial(last_stage, layers, order, labels.chunk(micro_batches), back, activations)


def _batch(gpu: torch.device, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (batch, 1, 28, 28) and labels (batch,), without numbers."""
    images = torch.empty(batch, *WIDE["image_shape"], device=gpu)
    labels = torch.empty(batch, dtype=torch.long, device=gpu)
    return images, labels


def _second_step(
    run: Callable[[], object], layers: nn.Module, gpu: torch.device, micro_batches: int
) -> RankStep:
    """`run` and an update of the weights, twice; the second time is measured."""
    optimizer = sgd(layers.parameters())
    run()  # the first step warms up: it makes the optimizer's state and the tool's buffers
    optimizer.step()
    multigpu.number_micro_batches(layers, layers, micro_batches)
    dist.barrier(device_ids=[gpu.index])  # all ranks begin the step at the same time
    torch.cuda.reset_peak_memory_stats(gpu)
    began = multigpu.elapsed()
    optimizer.zero_grad()
    run()
    held = multigpu.memory_held(layers, optimizer)[gpu]
    optimizer.step()
    timeline = multigpu.timeline(since=began)
    peak = torch.cuda.max_memory_allocated(gpu) / MIB
    lasting = ("weights", "gradients", "optimizer")
    return RankStep(peak, {use: held[use] / MIB for use in lasting}, timeline)


def joined(steps: Sequence[RankStep]) -> multigpu.Timeline:
    """The timelines of all ranks in one, whose messages say what they carry.

    A message to a later stage carries activations, one to an earlier stage gradients.
    """
    timeline = multigpu.Timeline.of_ranks([step.timeline for step in steps])
    messages = [event for event in timeline.events if event.name in ("send", "recv")]
    lanes = defaultdict(list)  # (name, start, end) of a message → its lanes
    for event in messages:
        lanes[event.name, event.start, event.end].append(event.device)
    for event in messages:
        other_end = "recv" if event.name == "send" else "send"
        # Two messages can go in opposite directions at the same time.
        others = lanes[other_end, event.start, event.end]
        other = next(lane for lane in others if lane != event.device)
        later = max(event.device, other)
        receiver = other if event.name == "send" else event.device
        timeline.notes[event] = "activations" if receiver == later else "gradients"
    return timeline


def phases(timeline: multigpu.Timeline) -> list[dict[str, float]]:
    """The milliseconds of computing in each phase, by lane."""
    milliseconds = []
    for lane in range(len(timeline.lanes)):
        spent: dict[str, float] = defaultdict(float)
        for event in timeline.events:
            if event.kind == "compute" and event.device == lane:
                spent[event.phase] += 1e3 * (event.end - event.start)
        milliseconds.append(spent)
    return milliseconds


def draw_peaks(steps: dict[str, Sequence[RankStep]], title: str) -> Figure:
    """Draw the peak memory of steps[name][rank] as bars, divided by use."""
    bars = {}
    for name, ranks in steps.items():
        for rank, step in enumerate(ranks):
            rest = step.peak - sum(step.held.values())
            # Activations, images, and what backward and the tool need for gradients of them.
            bars[f"{name}, rank {rank}"] = step.held | {"activations and other": rest}
    label = next(iter(steps.values()))[0].timeline.label
    return plots.stacked_bars(bars, f"peak, MiB ({label})", title, totals=True)
