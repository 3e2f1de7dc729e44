"""The longer experiments of lesson 03: steps of a split model on virtual GPUs.

Most of their tensors have shapes but no numbers (`shapes_only`), which is enough to simulate
memory and time. `step`, `Halves` and the pipeline's functions are those of the notebooks.
"""

import json
import os
import sys
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
from multigpu.course import find_root
from multigpu.models import CNN

MIB = 2**20
IMAGE = (1, 28, 28)
# The CNN of the times has 2 million weights, that of the memory 4 million.
WIDE = {"image_shape": IMAGE, "hidden": 320}
WIDER = {"image_shape": IMAGE, "hidden": 640}
FREE_LINK = multigpu.Link("free link", bandwidth=1e18, latency=0.0)
COUNTS = [1, 2, 4, 8, 16, 32]
# GPU and link, by the name of the curve.
MACHINES = {
    "V100, NVLink2": {"gpu": "V100-16GB", "link": "NVLink2"},
    "V100, PCIe3": {"gpu": "V100-16GB", "link": "PCIe3"},
    "H100, NVLink4": {"gpu": "H100-80GB", "link": "NVLink4"},
}


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The lesson's optimizer: SGD with momentum."""
    return torch.optim.SGD(weights, 0.05, momentum=0.9)


# ---- memory -------------------------------------------------------------------------------


def train(
    step: Callable,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: torch.device,
    last: torch.device,
    batch: int = 320,
) -> list[float]:
    """Two training steps with random images. Returns the peaks, in MiB, of the GPUs used."""
    for _ in range(2):
        images = torch.rand(batch, *IMAGE).to(first)
        labels = torch.zeros(batch, dtype=torch.long).to(last)
        step(model, optimizer, images, labels)
    return [torch.cuda.max_memory_allocated(gpu) / MIB for gpu in dict.fromkeys((first, last))]


def fails_in(step: Callable, model: nn.Module, first: torch.device, last: torch.device) -> str:
    """Try two training steps of 320 images, and print how they end.

    Returns "first" or "second", the step that runs out of memory, or "none".
    """
    optimizer = sgd(model.parameters())
    for number in ("first", "second"):
        images = torch.empty(320, *IMAGE, device=first)
        labels = torch.empty(320, dtype=torch.long, device=last)
        try:
            step(model, optimizer, images, labels)
        except torch.OutOfMemoryError as error:
            print(f"{number} step, in {multigpu.timeline().events[-1].phase}:")
            print("   ", ".\n    ".join(str(error).split(". ")[:3]))
            return number
        print(f"{number} step: done")
    return "none"


# ---- one process, two GPUs ----------------------------------------------------------------


def shares(timeline: multigpu.Timeline) -> dict[str, float]:
    """The fractions of the time that Timeline.breakdown gives, averaged over both GPUs."""
    breakdowns = [timeline.breakdown(lane) for lane in range(len(timeline.lanes))]
    return {
        part: sum(breakdown[part] for breakdown in breakdowns) / len(breakdowns)
        for part in breakdowns[0]
    }


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
    multigpu.number_micro_batches(model, model, micro_batches)
    optimizer = sgd(model.parameters())
    images = torch.empty(batch, *IMAGE, device=first)
    labels = torch.empty(batch, dtype=torch.long, device=last)
    for _ in range(2):  # the first step warms up
        began = multigpu.elapsed()
        step(model, optimizer, images, labels, micro_batches)
    return multigpu.elapsed() - began, multigpu.timeline(since=began)


def on_one_gpu(batch: int = 4096, gpu: str = "V100-16GB") -> float:
    """The simulated seconds of a training step of the wide CNN on one GPU."""

    def step(model, optimizer, images, labels, micro_batches) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    with multigpu.gpus(1, gpu=gpu, shapes_only=True) as (device,):
        return timed_step(
            step, CNN(**WIDE).to(device), device, device, batch, micro_batches=1
        )[0]


def seconds_in_one_process(micro_batches: int) -> float:
    """A step of the wide CNN by one process with two V100s and NVLink, simulated."""
    sys.path.insert(0, str(find_root() / "scripts"))
    from PT_CNN_ModelParallel import Halves, step

    with multigpu.gpus(2, gpu="V100-16GB", link="NVLink2", shapes_only=True) as gpus:
        model = Halves(CNN(**WIDE), *gpus)
        return timed_step(step, model, *gpus, 4096, micro_batches)[0]


def draw(timelines: dict[str, multigpu.Timeline]) -> Figure:
    """Draw timelines one below the other, at one scale; the names are the titles."""
    figure = plots.figure(8, 2.5 * len(timelines))
    longest = max(timeline.end - timeline.start for timeline in timelines.values())
    for place, (title, timeline) in enumerate(timelines.items(), 1):
        axes = figure.add_subplot(len(timelines), 1, place)
        timeline.plot(axes, title, until=longest)
    plots.share_legend(figure)
    return figure


def sweep(simulate: Callable) -> dict[str, list[float]]:
    """How many times as fast as one GPU two are, by machine, over COUNTS; prints them.

    simulate    simulate(micro_batches, batch, gpu=, link=) gives seconds and a timeline
    """
    speedups = {}
    for name, machine in MACHINES.items():
        one_gpu = on_one_gpu(gpu=machine["gpu"])
        speedups[name] = [one_gpu / simulate(count, **machine)[0] for count in COUNTS]
        print(f"{name}: {numbered(COUNTS, speedups[name], '.2f')}")
    return speedups


def numbered(counts: Iterable[int], values: Iterable[float], form: str) -> str:
    """The values with their numbers of micro-batches, as text."""
    return ", ".join(
        f"{count}: {value:{form}}" for count, value in zip(counts, values, strict=True)
    )


def by_link(simulate: Callable) -> dict[str, dict[str, float]]:
    """What the time of both GPUs goes to with 4 micro-batches, by link; prints it.

    Returns the fractions, and in "ms" the milliseconds of the bubble.
    """
    fractions = {}
    for link in ("NVLink2", FREE_LINK, "PCIe3"):
        name = link if isinstance(link, str) else link.name
        seconds, timeline = simulate(4, link=link)
        parts = shares(timeline)
        text = ", ".join(f"{part} {share:.0%}" for part, share in parts.items())
        fractions[name] = parts | {"ms": 1e3 * seconds * parts["bubble"]}
        print(f"{name}: {text}; the bubble takes {fractions[name]['ms']:.2f} ms")
    return fractions


def idle(simulate: Callable) -> dict[str, list[float]]:
    """The formula's bubble and simulated ones, as curves over COUNTS; prints them."""
    free = [shares(simulate(count, link=FREE_LINK)[1]) for count in COUNTS]
    nvlink = [shares(simulate(count, link="NVLink2")[1]) for count in COUNTS]
    curves = {
        "formula: 1/(m + 1)": [1 / (count + 1) for count in COUNTS],
        "bubble, free link": [parts["bubble"] for parts in free],
        "bubble, transfers, launches, NVLink": [1 - parts["compute"] for parts in nvlink],
    }
    for name, curve in curves.items():
        print(f"{name}: {numbered(COUNTS, curve, '.0%')}")
    return curves


def tutorial() -> tuple[list[int], dict[str, list[float]]]:
    """The curve of PyTorch's tutorial, published and simulated, from benchmarks/pieces.json.

    Returns the numbers of pieces, and how many times as fast as one GPU two are, by name.
    """
    report = json.loads((find_root() / "benchmarks" / "pieces.json").read_text())
    curves = report["times_as_fast_as_one_gpu"]
    pieces = [int(number) for number in curves["published"]]
    for name, curve in curves.items():
        seconds = report["seconds_of_one_gpu"][name]
        print(f"{name}, one GPU {seconds} s:\n{numbered(pieces, curve.values(), '.2f')}")
    return pieces, {name: list(curve.values()) for name, curve in curves.items()}


# ---- a process per GPU --------------------------------------------------------------------


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
                rank_order = order[world.rank]
                run = _by_hand(by_hand, layers, rank_order, world, gpu, micro_batches, batch)
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
    return steps, {case: joined(case_steps) for case, case_steps in steps.items()}


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
    images = torch.empty(batch, *IMAGE, device=gpu)
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


def compared(
    timelines: dict[str, multigpu.Timeline],
) -> tuple[dict[str, float], dict[str, float]]:
    """The milliseconds of each case's step, and the fraction of its bubble; prints both."""
    ms = {case: 1e3 * (timeline.end - timeline.start) for case, timeline in timelines.items()}
    bubbles = {case: shares(timeline)["bubble"] for case, timeline in timelines.items()}
    for case in timelines:
        print(f"{case}: {ms[case]:.2f} ms, bubble {bubbles[case]:.0%}")
    return ms, bubbles


def held_at_most(timeline: multigpu.Timeline) -> list[int]:
    """How many micro-batches each rank held at most, from forward to the end of backward."""
    most = []
    for lane in range(len(timeline.lanes)):
        began: dict[str, float] = {}
        ended: dict[str, float] = {}
        for event in timeline.events:
            number = timeline.notes.get(event)
            if event.device == lane and event.kind == "compute" and number:
                if event.phase == "forward":
                    began.setdefault(number, event.start)
                elif event.phase == "backward":
                    ended[number] = event.end
        held = [
            sum(began[other] <= began[number] < ended[other] for other in began)
            for number in began
        ]
        most.append(max(held))
    return most


def print_peaks(steps: dict[str, Sequence[RankStep]]) -> dict[str, list[float]]:
    """The peaks of steps[name][rank] in MiB; prints them."""
    peaks = {name: [step.peak for step in ranks] for name, ranks in steps.items()}
    for name, (first, last) in peaks.items():
        print(f"{name}: peak {first:.1f} MiB on rank 0, {last:.1f} on rank 1")
    return peaks


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
