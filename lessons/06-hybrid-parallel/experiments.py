"""The longer experiments of lesson 06: training steps on two nodes with two virtual GPUs each.

The tensors have shapes but no numbers (`shapes_only=True`). That is enough to simulate memory
and time.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import multigpu
from multigpu import launch
from multigpu.models import CNN
from multigpu.models.transformer import Block

GIB = 2**30
# The course's CNN with a wide hidden layer and many classes: fc1 has 564 million weights, fc2
# has 540 million.
LARGE = {"image_shape": (1, 28, 28), "hidden": 90_000, "classes": 6_000}
# Lesson 03's CNN, for which one GPU is enough.
SMALL = {"image_shape": (1, 28, 28), "hidden": 320}
CNNS = {"large": LARGE, "small": SMALL}
# How many modules stage 1 has. A cut between fc1 and fc2 halves the large model's weights and
# arithmetic; the small one is cut after its convolutions, as in the lesson's script.
CUTS = {"large": 7, "small": 4}
# A stack of transformer blocks that has 1.1 billion weights, too. Without an embedding and an
# output layer its halves are equal.
TRANSFORMER = {"blocks": 6, "hidden": 3_840, "heads": 30}
TOKENS = 1_024  # of a sequence
MICRO_BATCHES = 4
# Images of one step, or tokens, over all GPUs.
IMAGES = 8_192
# A step with sixteen times the tokens needs larger GPUs.
MANY_TOKENS = {"images": 131_072, "memory": "80GiB"}
# The micro-batches in flight on stage 1 and on stage 2, of 4.
ORDERS = {"GPipe": (4, 4), "1F1B": (2, 1)}
NETWORKS = ("Ethernet10", "Ethernet25", "HDR200")
# The GPUs of a rank, of the four: GPUs 0 and 1 are on the first node, 2 and 3 on the second.
LAYOUTS = {
    "four replicas": lambda rank: (rank,),
    "stages inside nodes": lambda rank: (2 * rank, 2 * rank + 1),
    "stages across nodes": lambda rank: (rank, rank + 2),
}
INSIDE, ACROSS = "stages inside nodes", "stages across nodes"
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
    error     the beginning of the OutOfMemoryError's text, or ""
    timeline  the step's timeline
    """

    seconds: float | None
    images: int
    peak: list[float]
    held: list[dict[str, float]]
    forward: list[float]
    update: list[float]
    error: str
    timeline: multigpu.Timeline

    @property
    def speed(self) -> float:
        """Images, or tokens, per simulated second."""
        return self.images / self.seconds


class Layouts(NamedTuple):
    """A step with stages inside nodes and one with stages across nodes, of each rank."""

    inside: list[Step]
    across: list[Step]

    @property
    def ratio(self) -> float:
        """How many times as fast the step is with stages across nodes."""
        return self.across[0].speed / self.inside[0].speed

    @property
    def waits(self) -> tuple[float, float]:
        """The seconds in which the first GPU only waits for messages, inside and across."""
        lines = (joined(steps) for steps in self)
        inside, across = (t.breakdown(0)["transfer"] * (t.end - t.start) for t in lines)
        return inside, across


class Stages(nn.Module):
    """The script's class Halves for any model: a stage on each of two GPUs."""

    def __init__(
        self,
        first: nn.Module,
        second: nn.Module,
        gpus: list[torch.device],
        micro_batches: int,
    ):
        super().__init__()
        self.first = first.to(gpus[0])
        self.second = second.to(gpus[1])
        self.gpus, self.micro_batches = gpus, micro_batches
        multigpu.number_micro_batches(self.first, self.second, micro_batches)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = []
        for micro_batch in inputs.chunk(self.micro_batches):
            activations = self.first(micro_batch)
            outputs.append(self.second(activations.to(self.gpus[1])))
        return torch.cat(outputs)


def cnn(name: str) -> CNN:
    """The CNN `name`, without numbers."""
    with torch.device("meta"):
        return CNN(**CNNS[name])


def cnn_stages(model: CNN, cut: int, gpus: list[torch.device], micro_batches: int) -> Stages:
    """`model` with its first `cut` modules on the first of two GPUs."""
    modules = [model.conv1, nn.Tanh(), model.conv2, nn.Tanh(), nn.Flatten()]
    modules += [model.fc1, nn.Tanh(), model.fc2]
    first, second = nn.Sequential(*modules[:cut]), nn.Sequential(*modules[cut:])
    return Stages(first, second, gpus, micro_batches)


def one_node(
    stages: int = 2,
    memory: str | None = None,
    gpu: str = "V100-16GB",
    model: str = "large",
    images: int = IMAGES // 2,
    micro_batches: int = MICRO_BATCHES,
) -> Step:
    """The third step with `model` in this process, alone on one node of two GPUs.

    With one stage the whole model is on the first GPU. `memory` is each GPU's capacity, by
    default that of `gpu`. The step has `images`, or tokens, in `micro_batches`.
    """
    with _gpus(2, gpu=gpu, memory=memory) as gpus:
        return _third_step(model, gpus[:stages], 1, images, micro_batches)


def two_nodes(*cases: tuple[str, str, str], **more: object) -> list[list[Step]]:
    """For each case (a model, a layout, a network): the third step, in each rank.

    A model is a name in CNNS or "transformer", a layout a name in LAYOUTS, and a network
    between the nodes one in multigpu.NETWORKS. `more` are arguments of `layout_steps`. All
    cases have as many ranks: four for "four replicas", otherwise two.
    """
    ranks = 4 if cases[0][1] == "four replicas" else 2
    return list(zip(*launch.call(layout_steps, ranks, cases, **more), strict=True))


def layouts(model: str, network: str = "Ethernet10", **more: object) -> Layouts:
    """The step of `model` with stages inside and across two nodes; prints both speeds."""
    result = Layouts(*two_nodes((model, INSIDE, network), (model, ACROSS, network), **more))
    rows = "tokens" if model == "transformer" else "images"
    print(f"{model}, {result.inside[0].images:,} {rows} in a step, {network}, simulated")
    for name, (step, *_), wait in zip((INSIDE, ACROSS), result, result.waits, strict=True):
        print(
            f"    {name}: {step.speed:,.0f} {rows}/s, a step {step.seconds:.1f} s, "
            f"GPU 0 only waits for messages {wait:.1f} s"
        )
    return result


def layout_steps(
    cases: list[tuple[str, str, str]],
    gpu: str = "V100-16GB",
    images: int = IMAGES,
    micro_batches: int = MICRO_BATCHES,
    memory: str | None = None,
) -> list[Step]:
    """What each rank does for `two_nodes`: its third step for each case.

    A step has `images`, or tokens, over all ranks. A replica of stages divides its part into
    `micro_batches`. `memory` is each GPU's capacity, by default that of `gpu`.
    """
    world = launch.find_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    steps = []
    for number, (model, layout, network) in enumerate(cases):
        own_store = dist.PrefixStore(str(number), store)
        with _own_gpus(world, own_store, layout, network, gpu, memory) as gpus:
            steps.append(_third_step(model, gpus, world.size, images, micro_batches))
    return steps


class Overlapped:
    """A replica of two stages whose transfers run beside computing, on their own streams.

    `in_flight` is the order: for each stage, how many micro-batches at most have gone forward
    there and not yet backward. 1F1B is (2, 1); GPipe is (4, 4) for 4 micro-batches.
    """

    def __init__(self, stages: Stages, in_flight: tuple[int, int]):
        self.stages = stages
        self.in_flight = in_flight
        # For each direction a stream on each of the two GPUs.
        self.to_second = {gpu: torch.cuda.Stream(gpu) for gpu in stages.gpus}
        self.to_first = {gpu: torch.cuda.Stream(gpu) for gpu in stages.gpus}

    def backward(self, images: torch.Tensor, labels: torch.Tensor, ranks: int = 1) -> None:
        """Add this rank's part of the gradients of the mean loss over all ranks' images."""
        stages = self.stages
        batches = images.chunk(stages.micro_batches)
        classes = labels.chunk(stages.micro_batches)
        on_first, on_second = self.in_flight
        outputs, activations, losses = {}, {}, {}

        def forward_first(number: int) -> None:
            outputs[number] = stages.first(batches[number])
            sent = outputs[number].detach()
            activations[number] = self._send(sent, stages.gpus[1], self.to_second)

        def forward_second(number: int) -> None:
            received = self._received(*activations.pop(number)).requires_grad_()
            logits = stages.second(received)
            loss = F.cross_entropy(logits, classes[number], reduction="sum")
            losses[number] = (received, loss / (len(images) * ranks))

        def backward(number: int) -> None:
            received, loss = losses.pop(number)
            loss.backward()
            gradient = self._send(received.grad, stages.gpus[0], self.to_first)
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
        source.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(source)
        with torch.cuda.stream(source), torch.cuda.stream(streams[to]):
            copy = tensor.to(to, non_blocking=True)
            return copy, streams[to].record_event()

    def _received(self, copy: torch.Tensor, end: torch.Event) -> torch.Tensor:
        """The copy. The GPU that computes with it waits for the end of the transfer."""
        stream = torch.cuda.current_stream(copy.device)
        stream.wait_event(end)
        copy.record_stream(stream)
        return copy


def overlapped_steps(
    cases: list[tuple[tuple[int, int], str, str]],
    images: int = IMAGES,
    micro_batches: int = MICRO_BATCHES,
) -> list[float]:
    """In each rank: images/s over all ranks for each case (an order, a layout, a network).

    It is the large model's third step with Adam, as in `layout_steps`, but with the class
    Overlapped; an order is its `in_flight`. All-reduces begin after backward.
    """
    world = launch.find_world()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    speeds = []
    for number, (in_flight, layout, network) in enumerate(cases):
        own_store = dist.PrefixStore(str(number), store)
        with _own_gpus(world, own_store, layout, network) as gpus:
            stages, inputs, labels = _cnn("large", gpus, images // world.size, micro_batches)
            order = Overlapped(stages, in_flight)
            optimizer = torch.optim.Adam(stages.parameters())
            for _ in range(3):  # the first two warm up
                began = multigpu.elapsed()
                optimizer.zero_grad()
                order.backward(inputs, labels, world.size)
                for weight in stages.parameters():
                    dist.all_reduce(weight.grad)
                optimizer.step()
                for gpu in gpus:
                    torch.cuda.synchronize(gpu)
            speeds.append(images / (multigpu.elapsed() - began))
    return speeds


def overlapped() -> dict[tuple[str, str], tuple[float, float]]:
    """With class Overlapped: images/s inside and across by order and network; prints them."""
    pairs = [(order, network) for order in ORDERS for network in NETWORKS]
    cases = [(ORDERS[order], at, net) for order, net in pairs for at in (INSIDE, ACROSS)]
    images_per_s, _ = launch.call(overlapped_steps, 2, cases)
    speeds = dict(
        zip(pairs, zip(images_per_s[::2], images_per_s[1::2], strict=True), strict=True)
    )
    print(f"{'images/s, simulated':22}" + "".join(f"{name:>18}" for name in NETWORKS))
    for order in ORDERS:
        for layout, name in enumerate((INSIDE, ACROSS)):
            row = "".join(f"{speeds[order, net][layout]:18,.0f}" for net in NETWORKS)
            print(f"{order + ', ' + name.split()[1]:22}{row}")
    return speeds


def one_node_overlapped() -> float:
    """Images/s of one node alone, with 1F1B and overlap, in 8 micro-batches."""
    case = (ORDERS["1F1B"], INSIDE, NETWORKS[0])
    ((speed,),) = launch.call(overlapped_steps, 1, [case], micro_batches=8)
    return speed


def memory_bars(**steps: Step) -> dict[str, dict[str, float]]:
    """The peak of each GPU of some steps by use, in GiB, by the name of the bar."""
    bars = {}
    for name, step in steps.items():
        for number, (held, peak) in enumerate(zip(step.held, step.peak, strict=True), 1):
            rest = {"activations and other": peak - sum(held.values())}
            key = f"{name} {number}" if len(step.peak) > 1 else name
            bars[key.replace("_", " ")] = held | rest
    return bars


@contextmanager
def _gpus(count: int, **more: object) -> Iterator[list[torch.device]]:
    """Shape-only GPUs whose allocator has expandable segments.

    Without them fragmentation takes more than a gibibyte, and the large model's stages do not
    fit into 16 GiB.
    """
    setting = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with mock.patch.dict(os.environ, setting):
        with multigpu.gpus(count, shapes_only=True, **more) as gpus:
            yield gpus


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
    with _gpus(4, gpu=gpu, memory=memory, **nodes) as gpus:
        rank_gpus = [gpus[index] for index in LAYOUTS[layout](world.rank)]
        torch.cuda.set_device(rank_gpus[0])
        dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size)
        yield rank_gpus
        dist.destroy_process_group()


def _third_step(
    name: str,
    gpus: list[torch.device],
    ranks: int,
    images: int,
    micro_batches: int = MICRO_BATCHES,
) -> Step:
    seconds, held, error, began = None, [], "", 0.0
    peak, forward, update = [], [], []
    try:
        if name == "transformer":
            model, loss_of = _transformer(gpus, images // ranks, micro_batches)
        else:
            model, inputs, labels = _cnn(name, gpus, images // ranks, micro_batches)

            def loss_of(wrapped: nn.Module) -> torch.Tensor:
                return F.cross_entropy(wrapped(inputs), labels)

        if ranks > 1:
            # Without its own copy of the gradients DDP needs less memory.
            model = DDP(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):  # the first two warm up
            began = multigpu.elapsed()
            optimizer.zero_grad()
            loss = loss_of(model)
            after_forward = multigpu.memory_held(model, optimizer)
            loss.backward()
            by_gpu = multigpu.memory_held(model, optimizer)
            before_update = _peaks(gpus)
            for gpu in gpus:
                torch.cuda.reset_peak_memory_stats(gpu)
            optimizer.step()
            update = _peaks(gpus)
            peak = [max(pair) for pair in zip(before_update, update, strict=True)]
        seconds = multigpu.elapsed() - began
        held = [
            {use: n / GIB for use, n in by_gpu[gpu].items() if n > GIB / 10} for gpu in gpus
        ]
        # DDP keeps the memory of the gradients, as large as the weights, while there are none.
        kept = ["weights"] if isinstance(model, DDP) else []
        for gpu in gpus:
            uses = after_forward[gpu]
            forward.append((uses["activations"] - sum(uses[use] for use in kept)) / GIB)
    except torch.OutOfMemoryError as failure:
        error = str(failure).partition(" Including")[0]
        peak = _peaks(gpus)
    timeline = multigpu.timeline(since=began)
    return Step(seconds, images, peak, held, forward, update, error, timeline)


def _cnn(
    name: str, gpus: list[torch.device], images: int, micro_batches: int = MICRO_BATCHES
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The CNN `name` on `gpus`, images on the first of them, and labels on the last."""
    model = cnn(name)
    if len(gpus) == 1:
        model.to(gpus[0])
    else:
        model = cnn_stages(model, CUTS[name], gpus, micro_batches)
    inputs = torch.empty(images, 1, 28, 28, device=gpus[0])
    labels = torch.empty(images, dtype=torch.long, device=gpus[-1])
    return model, inputs, labels


def _transformer(
    gpus: list[torch.device], tokens: int, micro_batches: int
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The transformer in two stages or on one GPU, and its loss as a function of the model."""
    count, hidden, heads = TRANSFORMER.values()
    with torch.device("meta"):
        blocks = [Block(hidden, heads, causal=True) for _ in range(count)]
    if len(gpus) == 1:
        model = nn.Sequential(*blocks).to(gpus[0])
    else:
        first, second = (
            nn.Sequential(*blocks[: count // 2]),
            nn.Sequential(*blocks[count // 2 :]),
        )
        model = Stages(first, second, gpus, micro_batches)
    inputs = torch.empty(tokens // TOKENS, TOKENS, hidden, device=gpus[0])
    return model, lambda wrapped: wrapped(inputs).square().mean()


def _peaks(gpus: list[torch.device]) -> list[float]:
    """The highest GiB on each of `gpus` since they started, or since the last reset."""
    return [torch.cuda.max_memory_allocated(gpu) / GIB for gpu in gpus]


def joined(steps: list[Step]) -> multigpu.Timeline:
    """The timelines of all ranks of a step in one, with a lane for each GPU, named by node."""
    whole = multigpu.Timeline.of_ranks([step.timeline for step in steps])
    whole.lanes = [LANES[int(lane.partition("cuda:")[2])] for lane in whole.lanes]
    whole.label = steps[0].timeline.label
    return whole
