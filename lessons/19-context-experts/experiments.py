"""The longer experiments of lesson 19: equal weights; a ring's memory and time; load.

A way to share is a name: "serial", "plain", "zigzag" or "torch" for the sequence, and
"experts", whose MLPs are mixtures of experts. A program has functions and classes that replace
those of the same names in the script, or, for "experts", in experts.py.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import multigpu
from multigpu import launch, plots
from multigpu.course import find_root

sys.path.insert(0, str(find_root() / "scripts"))

import experts
import PT_GPT_ContextExperts as script

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERTS = 8
SIZE = {"hidden": 4096, "heads": 16}
UNCHANGED = SimpleNamespace()
ORDERS = ("plain", "zigzag")


@contextmanager
def group(backend: str) -> Iterator[launch.World]:
    """The process group of a run's ranks, also of one alone."""
    world = launch.find_world()
    if world.size > 1:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        _Groups.made += 1
        store = dist.PrefixStore(str(_Groups.made), store)
    else:
        store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    try:
        yield world
    finally:
        dist.destroy_process_group()


class _Groups:
    """How many groups this process has made: each has keys of its own."""

    made = 0


def complete(way: str, program: Any) -> SimpleNamespace:
    """The program with what it does not replace."""
    names = vars(script) | (vars(experts) if way == "experts" else {}) | {"plain": plain}
    return SimpleNamespace(**names | vars(program))


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one rank; its name is looked up, so that torch can replace it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain(ranks: int) -> list[list[int]]:
    """The chunk of a sequence that each rank has, in plain order."""
    return [[rank] for rank in range(ranks)]


def places_of(owned: list[list[int]], tokens: int, rank: int) -> torch.Tensor:
    """The places of a sequence that this rank has, of so many chunks on each."""
    chunks = torch.arange(tokens).chunk(len(owned) * len(owned[0]))
    return torch.cat([chunks[number] for number in owned[rank]])


# ---- the small GPT on the CPU ---------------------------------------------------------------


def train(ways: list[str], program: Any = UNCHANGED, steps: int = 5, capacity: float = 1.25):
    """For each way: all weights after `steps` steps on 8 digits each, in 64 bit.

    `launch.call(train, 2, ways)` has two ranks; `train(ways)` is the run of one.
    """
    with group("gloo") as world:
        return [_trained(way, complete(way, program), steps, capacity, world) for way in ways]


def _trained(
    way: str, program: Any, steps: int, capacity: float, world: launch.World
) -> torch.Tensor:
    torch.manual_seed(0)
    mine, attend, places, train_step = slice(None), alone, torch.arange(64), program.train_step
    if way in ORDERS:
        owned = getattr(program, way)(world.size)
        places = places_of(owned, 64, world.rank)
        attend = partial(program.RingAttention.apply, owned)
    model = program.GPT(2, 48, 4, attend)
    if way == "experts":
        mine = slice(world.rank, None, world.size)
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.blocks:
            block.mlp = program.Experts(48, EXPERTS, capacity, mesh)
        train_step = partial(train_step, balance=0.01)
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.006, foreach=False)
    data = script.read_tokens()
    for step in range(steps):
        rows = data[8 * step : 8 * step + 8][mine]
        train_step(model, optimizer, rows, places)
    weights = [w.full_tensor() if isinstance(w, DTensor) else w for w in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in weights])


# ---- long sequences on virtual GPUs, with shapes only ---------------------------------------


@dataclass
class StepResult:
    """A step's peak in GiB, simulated seconds, and timeline."""

    peak: float
    seconds: float
    timeline: multigpu.Timeline


def with_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention whose scores, tokens × tokens for each head, are all in memory."""
    return script.scores(q, k, True).softmax(-1) @ v


def steps(
    cases: list[tuple[str, int]],
    program: Any = UNCHANGED,
    layers: int = 2,
    link: str = "NVLink3",
) -> list[StepResult]:
    """For each (way, tokens): the second step of a GPT of 4,096 hidden units in bfloat16.

    Several ranks run it with launch.call, a process for each A100. It has room for 64 TiB, so
    that what does not fit is counted, too.
    """
    results = []
    for way, tokens in cases:
        size = launch.find_world().size
        options = {"gpu": "A100-80GB", "link": link, "memory": "65536GiB"}
        with multigpu.gpus(size, shapes_only=True, **options) as gpus, group("nccl") as world:
            torch.cuda.set_device(gpus[world.rank])
            results.append(_step(way, complete(way, program), tokens, layers, world))
    return results


def _step(way: str, program: Any, tokens: int, layers: int, world: launch.World) -> StepResult:
    attend, around, rank_tokens = alone, nullcontext, tokens
    if way == "scores":
        attend = with_scores
    elif way in ORDERS:
        attend = partial(program.RingAttention.apply, getattr(program, way)(world.size))
        rank_tokens = tokens // world.size
    with torch.device("cuda"):
        model = script.GPT(layers, *SIZE.values(), attend, tokens).bfloat16()
        data = torch.zeros(1, tokens + 1, dtype=torch.long)
        places = torch.zeros(rank_tokens, dtype=torch.long)  # shapes alone matter
    if way == "torch":  # in its context, `places` are this rank's, and attention shares
        mesh = init_device_mesh("cuda", (world.size,))
        around = partial(context_parallel, mesh, buffers=[places], buffer_seq_dims=[0])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        began = multigpu.elapsed()
        with around():
            script.train_step(model, optimizer, data, places)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return StepResult(peak, multigpu.elapsed() - began, multigpu.timeline(since=began))


def memory(lengths: list[int], ranks: int = 4) -> dict[str, list[float]]:
    """GiB at the peak of a step for each length: on one GPU, and on each of the ring's."""
    alone = [(way, tokens) for way in ("scores", "serial") for tokens in lengths]
    results = steps(alone, layers=5)
    ring = [("zigzag", tokens) for tokens in lengths]
    in_ring = launch.call(steps, ranks, ring, layers=5)[0]
    scores, flash = results[: len(lengths)], results[len(lengths) :]
    curves = {"1 GPU, all scores in memory": scores, "1 GPU, flash attention": flash}
    curves[f"ring of {ranks}, by hand"] = in_ring
    return {name: [result.peak for result in curve] for name, curve in curves.items()}


def draw_memory(lengths: list[int], peaks: dict[str, list[float]]) -> "Figure":
    """Curves over the sequence's length; the dotted line is an A100's memory."""
    title = "Peak of a step on each GPU (counted; dotted: 80 GiB)"
    figure = plots.lines(lengths, peaks, "tokens of a sequence", "GiB", title, level=80)
    lowest = min(min(curve) for curve in peaks.values())
    figure.axes[0].set(yscale="log", ylim=(0.7 * lowest, 20000))
    return figure


def off_with_torch() -> float:
    """How far context_parallel's output and gradients are from one GPU's, with numbers."""
    size = launch.find_world().size
    with multigpu.gpus(size, "V100-16GB") as gpus, group("nccl") as world:
        torch.cuda.set_device(gpus[world.rank])
        torch.manual_seed(0)
        q, k, v, gradient = torch.randn(4, 2, 4, 16, 8).cuda()
        expected = _attended(q, k, v, gradient)
        parts = [q.clone(), k.clone(), v.clone(), gradient, *expected]
        mesh = init_device_mesh("cuda", (size,))
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * len(parts)):
            outputs = _attended(*parts[:4])
            pairs = zip(outputs, parts[4:], strict=True)
            return max((output - other).abs().max().item() for output, other in pairs)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor):
    """Attention's output, and the gradients of q, k and v."""
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = alone(*inputs)
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def draw_orders(steps_by_order: dict[str, list[StepResult]]) -> "Figure":
    """A panel for each order: each rank's lane in one step."""
    figure = plots.figure(8, 0.4 + 2.2 * len(steps_by_order))
    longest = max(of_ranks[0].seconds for of_ranks in steps_by_order.values())
    for place, (name, of_ranks) in enumerate(steps_by_order.items(), 1):
        axes = figure.add_subplot(len(steps_by_order), 1, place)
        timeline = multigpu.Timeline.of_ranks([rank_step.timeline for rank_step in of_ranks])
        timeline.plot(axes, f"{name}: {1e3 * of_ranks[0].seconds:.0f} ms", until=longest)
    plots.share_legend(figure)
    return figure


# ---- the experts' load ----------------------------------------------------------------------


@dataclass
class Load:
    """What the first block's router did with the tokens of the last steps."""

    shares: list[float]  # of the tokens, for each expert, the largest first
    dropped: float
    loss: float


def load(
    balance: float, program: Any = UNCHANGED, capacity: float = 1.25, count: int = 60
) -> Load:
    """Train a GPT of one block with 8 experts for `count` steps of 16 digits, on one rank."""
    program = complete("experts", program)
    with group("gloo") as world:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (world.size,))
        model = script.GPT(1, 48, 4, alone)
        for block in model.blocks:
            block.mlp = program.Experts(48, EXPERTS, capacity, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 0.006, foreach=False)
        data, places = script.read_tokens(), torch.arange(64)
        counts, dropped, losses = torch.zeros(EXPERTS), [], []
        for step in range(count):
            rows = data[(16 * step) % 1424 :][:16]
            loss = program.train_step(model, optimizer, rows, places, balance)
            losses.append(loss.item())
            if step >= count - 10:
                counts += model.blocks[0].mlp.load
                dropped.append(model.blocks[0].mlp.dropped.item())
        shares = sorted((counts / counts.sum()).tolist(), reverse=True)
        return Load(shares, sum(dropped) / len(dropped), sum(losses[-10:]) / 10)


def draw_load(loads: dict[str, Load]) -> "Figure":
    """Bars: the share of the tokens that each expert got; dotted: an equal share."""
    figure = plots.figure(8, 2.6)
    for place, (name, load) in enumerate(loads.items(), 1):
        axes = figure.add_subplot(1, len(loads), place)
        axes.bar(
            range(1, EXPERTS + 1), [100 * share for share in load.shares], color=plots.BLUE
        )
        axes.axhline(100 / EXPERTS, color=plots.INK, linestyle=":")
        title = f"{name}: {load.dropped:.0%} dropped"
        axes.set(title=title, xlabel="experts, the busiest first", ylabel="% of tokens")
        axes.set_ylim(0, 100)
    return figure
