"""The longer experiments of lesson 06: training steps on two nodes with two virtual GPUs each.

The tensors have shapes but no numbers (`compute=False`). That is enough to simulate memory and
time.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from multigpu import launch, vgpu
from multigpu.models import CNN
from multigpu.models.transformer import Block

GIB = 2**30
# The course's CNN with a wide hidden layer and many classes: fc1 has 564 million weights, fc2
# has 540 million.
LARGE = {"image_shape": (1, 28, 28), "hidden": 90_000, "classes": 6_000}
# Lesson 03's CNN, for which one GPU is enough.
SMALL = {"image_shape": (1, 28, 28), "hidden": 320}
MODELS = {"large": LARGE, "small": SMALL}
# The layers on the first of two GPUs. For the large model, a cut between fc1 and fc2 halves
# the weights and the arithmetic.
CUTS = {"large": 3, "small": 2}
# A stack of transformer blocks that has 1.1 billion weights, too. Without an embedding and an
# output layer its halves are equal.
TRANSFORMER = {"blocks": 6, "hidden": 3_840, "heads": 30}
TOKENS = 1_024  # of a sequence
MICRO_BATCHES = 4
# Images of one step, or tokens, over all GPUs.
IMAGES = 8_192
# The GPUs of a rank, of the four: GPUs 0 and 1 are on the first node, 2 and 3 on the second.
LAYOUTS = {
    "four replicas": lambda rank: (rank,),
    "stages inside nodes": lambda rank: (2 * rank, 2 * rank + 1),
    "stages across nodes": lambda rank: (rank, rank + 2),
    "FSDP over four GPUs": lambda rank: (rank,),
    "FSDP inside nodes": lambda rank: (rank,),
}
LANES = [f"node {gpu // 2}, GPU {gpu % 2}" for gpu in range(4)]


class Step(NamedTuple):
    """One training step of a rank.

    seconds   simulated; None if the step did not fit
    images    the images of the step, or the transformer's tokens, over all ranks
    peak      the highest GiB on each of the rank's GPUs
    held      the GiB by use on each of them, after backward, without uses below 0.1 GiB
    forward   the GiB of activations on each of them at the end of forward, without the memory
              that DDP keeps for gradients
    update    the highest GiB on each of them during the optimizer's step
    error     the text of the OutOfMemoryError, or ""
    timeline  the step's timeline, with a lane for each of the rank's GPUs
    """

    seconds: float | None
    images: int
    peak: list[float]
    held: list[dict[str, float]]
    forward: list[float]
    update: list[float]
    error: str
    timeline: vgpu.Timeline


class OverlappedStep(NamedTuple):
    """One training step of a rank with the class Overlapped.

    speed  images/s over all ranks, simulated
    peak   the higher of the two GPUs' peaks, in GiB
    """

    speed: float
    peak: float


class TransformerHalves(nn.Module):
    """A stack of transformer blocks, one half on the GPU `first`, the other on `second`."""

    def __init__(self, first: torch.device, second: torch.device, micro_batches: int):
        super().__init__()
        blocks = _blocks()
        half = len(blocks) // 2
        self.first = nn.Sequential(*blocks[:half]).to(first)
        self.last = nn.Sequential(*blocks[half:]).to(second)
        self.second = second
        self.micro_batches = micro_batches

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        outputs = []
        for micro_batch in sequences.chunk(self.micro_batches):
            outputs.append(self.last(self.first(micro_batch).to(self.second)))
        return torch.cat(outputs)


def _blocks() -> list[Block]:
    count, hidden, heads = TRANSFORMER.values()
    return [Block(hidden, heads, causal=True) for _ in range(count)]


def one_process(
    halves: type | None,
    memory: str | None = None,
    gpu: str = "V100-16GB",
    model: str = "large",
    images: int = IMAGES // 2,
    micro_batches: int = MICRO_BATCHES,
) -> Step:
    """The third step with `model` in this process, alone on one node of two GPUs.

    `halves` is the lesson's class Halves, which uses both GPUs; None puts the whole model on
    the first GPU. `memory` is each GPU's capacity, by default that of `gpu`. The step has
    `images`, or tokens, in `micro_batches`.
    """
    with vgpu.running(2, gpu=gpu, memory=memory, compute=False) as gpus:
        own = gpus if halves else gpus[:1]
        return _third_step(model, halves, own, 1, images, micro_batches)


def layout_steps(
    cases: list[tuple[str, str, str]],
    halves: type,
    gpu: str = "V100-16GB",
    images: int = IMAGES,
    micro_batches: int = MICRO_BATCHES,
    memory: str | None = None,
    shard: Callable | None = None,
) -> list[Step]:
    """In each rank: the third step with Adam for each case (a model, a layout, a network).

    A model is a name in MODELS or "transformer", a layout a name in LAYOUTS, and a network
    between the nodes one in vgpu.NETWORKS. A step has `images`, or tokens, over all ranks. A
    replica of stages divides its part into `micro_batches`. `memory` is each GPU's capacity,
    by default that of `gpu`. Run it with launch.call, in as many processes as the layouts have
    ranks: two for stages, otherwise four. A layout of FSDP needs `shard`, the notebook's
    function shard_weights(model, way), in which `way` is the layout.
    """
    world = launch.find_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    steps = []
    for number, (model, layout, network) in enumerate(cases):
        own_store = dist.PrefixStore(str(number), store)
        with _own_gpus(world, own_store, layout, network, gpu, memory) as own:
            sharding = partial(shard, way=layout) if layout.startswith("FSDP") else None
            counts = (world.size, images, micro_batches)
            steps.append(_third_step(model, halves, own, *counts, sharding))
    return steps


class Overlapped:
    """A replica of two stages whose transfers run beside computing, on their own streams.

    `model` is an object of the lesson's class Halves with cut=3. `in_flight` is the order: for
    each stage, how many micro-batches at most have gone forward there and not yet backward.
    1F1B is (2, 1); GPipe is (4, 4) for 4 micro-batches.
    """

    def __init__(self, model: nn.Module, in_flight: tuple[int, int]):
        self.model = model
        self.in_flight = in_flight
        # For each direction a stream on each of the two GPUs.
        gpus = (model.first, model.second)
        self.to_second = {gpu: torch.vgpu.Stream(gpu) for gpu in gpus}
        self.to_first = {gpu: torch.vgpu.Stream(gpu) for gpu in gpus}

    def backward(self, images: torch.Tensor, labels: torch.Tensor, ranks: int = 1) -> None:
        """Add this rank's part of the gradients of the mean loss over all ranks' images."""
        model = self.model
        batches = images.chunk(model.micro_batches)
        classes = labels.chunk(model.micro_batches)
        on_first, on_second = self.in_flight
        outputs, activations, losses = {}, {}, {}

        def forward_first(number: int) -> None:
            x = torch.tanh(model.conv1(batches[number]))
            x = torch.tanh(model.conv2(x)).flatten(1)
            outputs[number] = torch.tanh(model.fc1(x))
            sent = outputs[number].detach()
            activations[number] = self._send(sent, model.second, self.to_second)

        def forward_second(number: int) -> None:
            received = self._received(*activations.pop(number)).requires_grad_()
            logits = model.fc2(received)
            loss = F.cross_entropy(logits, classes[number], reduction="sum")
            losses[number] = (received, loss / (len(images) * ranks))

        def backward(number: int) -> None:
            received, loss = losses.pop(number)
            loss.backward()
            gradient = self._send(received.grad, model.first, self.to_first)
            outputs.pop(number).backward(self._received(*gradient))

        count = len(batches)
        for number in range(min(on_first, count)):
            forward_first(number)
        for number in range(min(on_second - 1, count)):
            forward_second(number)
        for number in range(count):
            if number + on_second <= count:
                forward_second(number + on_second - 1)
            backward(number)
            if number + on_first < count:
                forward_first(number + on_first)

    def _send(
        self, tensor: torch.Tensor, to: torch.device, streams: dict
    ) -> tuple[torch.Tensor, torch.Event]:
        """Begin to copy `tensor`. Returns the copy and the event of its end."""
        source = streams[tensor.device]
        source.wait_stream(torch.vgpu.current_stream(tensor.device))
        tensor.record_stream(source)
        with torch.vgpu.stream(source), torch.vgpu.stream(streams[to]):
            copy = tensor.to(to, non_blocking=True)
            return copy, streams[to].record_event()

    def _received(self, copy: torch.Tensor, end: torch.Event) -> torch.Tensor:
        """The copy. The GPU that computes with it waits for the end of the transfer."""
        stream = torch.vgpu.current_stream(copy.device)
        stream.wait_event(end)
        copy.record_stream(stream)
        return copy


def overlapped_steps(
    cases: list[tuple[tuple[int, int], str, str]],
    halves: type,
    images: int = IMAGES,
    micro_batches: int = MICRO_BATCHES,
) -> list[OverlappedStep]:
    """In each rank: the third step for each case (an order, a layout of stages, a network).

    It is the large model's step with Adam, as in `layout_steps`, but with the class
    Overlapped; an order is its `in_flight`. All-reduces begin after backward.
    """
    world = launch.find_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    found = []
    for number, (in_flight, layout, network) in enumerate(cases):
        own_store = dist.PrefixStore(str(number), store)
        with _own_gpus(world, own_store, layout, network) as own:
            model, inputs, labels = _cnn(
                "large", halves, own, images // world.size, micro_batches
            )
            order = Overlapped(model, in_flight)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):  # the first two warm up
                began = vgpu.elapsed()
                optimizer.zero_grad()
                order.backward(inputs, labels, world.size)
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
                optimizer.step()
                for gpu in own:
                    torch.vgpu.synchronize(gpu)
            speed = images / (vgpu.elapsed() - began)
            found.append(OverlappedStep(speed, max(_peaks(own))))
    return found


@contextmanager
def _own_gpus(
    world: launch.World,
    store: dist.Store,
    layout: str,
    network: str,
    gpu: str = "V100-16GB",
    memory: str | None = None,
) -> Iterator[list[torch.device]]:
    """The GPUs of this rank in `layout`, on two nodes, with a process group of all ranks."""
    # Every rank sees all four GPUs and takes its own.
    nodes = {"gpus_per_node": 2, "between_nodes": network}
    with vgpu.running(4, gpu=gpu, memory=memory, compute=False, **nodes) as gpus:
        dist.init_process_group("vgpu", store=store, rank=world.rank, world_size=world.size)
        own = [gpus[index] for index in LAYOUTS[layout](world.rank)]
        torch.vgpu.set_device(own[0])  # the device that FSDP uses
        yield own
        dist.destroy_process_group()


def _third_step(
    name: str,
    halves: type | None,
    gpus: list[torch.device],
    ranks: int,
    images: int,
    micro_batches: int = MICRO_BATCHES,
    shard: Callable[[nn.Module], None] | None = None,
) -> Step:
    seconds, held, error, began = None, [], "", 0.0
    peak, forward, update = [], [], []
    try:
        if name == "transformer":
            model, loss_of = _transformer(gpus, images // ranks, micro_batches)
        else:
            model, inputs, labels = _cnn(name, halves, gpus, images // ranks, micro_batches)

            def loss_of(wrapped: nn.Module) -> torch.Tensor:
                return F.cross_entropy(wrapped(inputs), labels)

        if shard:
            shard(model)
        elif ranks > 1:
            # Without its own copy of the gradients DDP needs less memory.
            model = DDP(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):  # the first two warm up
            began = vgpu.elapsed()
            optimizer.zero_grad()
            loss = loss_of(model)
            after_forward = vgpu.memory_held(model, optimizer)
            loss.backward()
            by_gpu = vgpu.memory_held(model, optimizer)
            before_update = _peaks(gpus)
            for gpu in gpus:
                torch.vgpu.reset_peak_memory_stats(gpu)
            optimizer.step()
            update = _peaks(gpus)
            peak = [max(pair) for pair in zip(before_update, update, strict=True)]
        seconds = vgpu.elapsed() - began
        held = [
            {use: n / GIB for use, n in by_gpu[gpu].items() if n > GIB / 10} for gpu in gpus
        ]
        # DDP keeps the memory of the gradients, as large as the weights, while there are none.
        kept = ["weights"] if isinstance(model, DDP) else []
        for gpu in gpus:
            uses = after_forward[gpu]
            forward.append((uses["activations"] - sum(uses[use] for use in kept)) / GIB)
    except torch.OutOfMemoryError as failure:
        error = str(failure)
        peak = _peaks(gpus)
    timeline = _only_lanes(vgpu.timeline(since=began), [gpu.index for gpu in gpus])
    return Step(seconds, images, peak, held, forward, update, error, timeline)


def _cnn(
    name: str,
    halves: type | None,
    gpus: list[torch.device],
    images: int,
    micro_batches: int = MICRO_BATCHES,
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The CNN `name` on `gpus`, images on the first of them, and labels on the last."""
    with torch.device("meta"):
        if len(gpus) == 1:
            model = CNN(**MODELS[name]).to(gpus[0])
        else:
            model = halves(*gpus, micro_batches, **MODELS[name], cut=CUTS[name])
            vgpu.number_micro_batches(model.conv1, model.fc2, micro_batches)
    inputs = torch.empty(images, 1, 28, 28, device=gpus[0])
    labels = torch.empty(images, dtype=torch.long, device=gpus[-1])
    return model, inputs, labels


def _transformer(
    gpus: list[torch.device], tokens: int, micro_batches: int
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The transformer in two stages or on one GPU, and its loss as a function of the model."""
    with torch.device("meta"):
        if len(gpus) == 1:
            model = nn.Sequential(*_blocks()).to(gpus[0])
        else:
            model = TransformerHalves(*gpus, micro_batches)
            vgpu.number_micro_batches(model.first, model.last, micro_batches)
    size = (tokens // TOKENS, TOKENS, TRANSFORMER["hidden"])
    inputs = torch.empty(size, device=gpus[0])
    return model, lambda wrapped: wrapped(inputs).square().mean()


def _peaks(gpus: list[torch.device]) -> list[float]:
    """The highest GiB on each of `gpus` since they started, or since the last reset."""
    return [torch.vgpu.max_memory_allocated(gpu) / GIB for gpu in gpus]


def _only_lanes(timeline: vgpu.Timeline, gpus: list[int]) -> vgpu.Timeline:
    """The timeline with the lanes of these GPUs, in this order, which are named by node."""
    events, notes = [], {}
    for event in timeline.events:
        if event.device not in gpus:
            continue
        peer = gpus.index(event.peer) if event.peer in gpus else event.peer
        moved = event._replace(device=gpus.index(event.device), peer=peer)
        events.append(moved)
        if event in timeline.notes:
            notes[moved] = timeline.notes[event]
    lanes = [LANES[gpu] for gpu in gpus]
    span = (timeline.start, timeline.end)
    return vgpu.Timeline(events, lanes, *span, timeline.label, notes)


def joined(steps: list[Step]) -> vgpu.Timeline:
    """The timelines of all ranks of a step in one, with a lane for each GPU."""
    timelines = [step.timeline for step in steps]
    lanes = [lane for timeline in timelines for lane in timeline.lanes]
    whole = vgpu.Timeline.of_ranks(timelines)
    whole.lanes = lanes
    whole.label = timelines[0].label
    return whole
