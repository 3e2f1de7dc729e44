"""The longer experiments of lesson 15: equal weights; a step's memory, bytes and time.

`share(model, lr, mesh)` shares a model's training, and returns its optimizer: zero.py's
Zero1, Zero2 and Zero3, the script's fsdp, and None for a copy of everything on each rank.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import multigpu
from multigpu import launch, plots
from multigpu.course import find_root
from multigpu.virtual import face
from multigpu.virtual.options import Options
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.event import Event

sys.path.insert(0, str(find_root() / "scripts"))

import PT_GPT_FSDP as script

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Share = Callable[..., Any] | None
GPU = "A100-80GB"
WORKSPACES = 2 * 8320 * 1024  # cuBLAS's on an A100
CARRIES = {"allgather": "weights", "reduce_scatter": "gradients", "allreduce": "gradients"}

# ---- the small GPT on the CPU ---------------------------------------------------------------


def train(
    shares: list[Share], steps: int = 5, shape: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """For each way to share: all weights after `steps` steps on this rank's part of 8 digits.

    It is in 64 bit, where rounding stays small. `launch.call(train, 2, shares)` has two ranks;
    `train([None])` is the serial run. With `shape`, the mesh has groups × ranks.
    """
    world = launch.find_world()
    if world.size > 1:
        dist.init_process_group("gloo")
    weights = [_trained(share, steps, shape, world) for share in shares]
    if world.size > 1:
        dist.destroy_process_group()
    return weights


def _trained(
    share: Share, steps: int, shape: tuple[int, ...], world: launch.World
) -> torch.Tensor:
    torch.manual_seed(0)
    model = script.GPT(2, 48, 4).double()
    if share is None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.006)
    else:
        optimizer = share(model, 0.006, _mesh("cpu", shape or (world.size,)))
    data = script.read_tokens()
    for step in range(steps):
        rows = data[8 * step : 8 * step + 8][world.rank :: world.size]
        script.train_step(model, optimizer, rows)
    if hasattr(optimizer, "whole"):
        optimizer.whole(model)
    weights = [w.full_tensor() if isinstance(w, DTensor) else w for w in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in weights])


def _mesh(kind: str, shape: tuple[int, ...]) -> Any:
    """The ranks in a row, or groups of ranks that share a copy of the model."""
    names = ("parts",) if len(shape) == 1 else ("copies", "parts")
    return init_device_mesh(kind, shape, mesh_dim_names=names)


# ---- a large GPT on virtual GPUs, with shapes only ------------------------------------------


@dataclass
class StepResult:
    """What a step of one rank takes.

    weights, gradients, optimizer   bytes for each weight of the model, when backward has ended
    sent      numbers of 32 bit for each weight that the rank sends in a step
    seconds   of the step, simulated
    """

    weights: float
    gradients: float
    optimizer: float
    sent: float
    seconds: float
    timeline: multigpu.Timeline

    @property
    def bytes(self) -> float:
        """Bytes for each weight of the model that the rank keeps."""
        return self.weights + self.gradients + self.optimizer


def step(
    share: Share,
    ranks: int,
    layers: int = 4,
    batch: int = 1,
    half: bool = False,
    shape: tuple[int, ...] = (),
    link: str = "NVLink3",
    per_node: int | None = None,
    between: str | None = None,
) -> StepResult:
    """The second step of a GPT of `layers` blocks of 2,048 hidden units, 1,024 tokens long.

    It has the digits' vocabulary, so that nearly all weights are in its blocks. With `half` it
    computes in 16 bit by autocast; for fsdp, a MixedPrecisionPolicy says that.
    """
    options = Options(
        gpus=per_node or ranks,
        gpu=GPU,
        link=link,
        gpus_per_node=per_node,
        between_nodes=between,
        shapes_only=True,
        world=ranks,
    )
    with face.first_rank(options) as gpu:
        with gpu:
            rows = torch.zeros(batch, 1025, dtype=torch.long)
            model = script.GPT(layers, 2048, 16, 1024)
        count = sum(weight.numel() for weight in model.parameters())
        if share is None:
            model = DDP(model, gradient_as_bucket_view=True)
            optimizer = torch.optim.AdamW(model.parameters())
        else:
            optimizer = share(model, 0.001, _mesh("cuda", shape or (ranks,)))
        weights = torch.cuda.memory_allocated() - rows.nbytes
        sent = machine.current().clock.sent
        for _ in range(2):
            before, began = sum(sent.values()), multigpu.elapsed()
            with torch.autocast("cuda", torch.bfloat16, half):
                logits = model(rows[:, :-1]).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
            del logits
            loss.backward()
            with_gradients = torch.cuda.memory_allocated()
            optimizer.step()
            optimizer.zero_grad()
        without = torch.cuda.memory_allocated()
        result = StepResult(
            weights / count,
            (with_gradients - without) / count,
            (without - weights - WORKSPACES) / count,
            (sum(sent.values()) - before) / 4 / count,
            multigpu.elapsed() - began,
            multigpu.timeline(since=began),
        )
        del model, optimizer, loss
    return result


def count_sent(shares: dict[str, Share], numbers: list[int]) -> dict[str, list[float]]:
    """What a rank sends in a step, in Ψ, for each number of ranks; prints it."""
    sent_by_share = {}
    for name, share in shares.items():
        sent_by_share[name] = []
        for ranks in numbers:
            nodes = {"per_node": 8, "between": "NDR400"} if ranks > 8 else {}
            sent_by_share[name].append(step(share, ranks, **nodes).sent)
        of_ranks = zip(sent_by_share[name], numbers, strict=True)
        counts = ", ".join(f"{sent:.2f} Ψ on {ranks}" for sent, ranks in of_ranks)
        print(f"{name}: {counts} GPUs")
    return sent_by_share


def table(stage: int, ranks: int) -> float:
    """Bytes a weight by ZeRO's table, in 32 bit: 4 of weight, 4 of gradient, 8 of AdamW."""
    shared = {0: 0, 1: 8, 2: 12, 3: 16}[stage]
    return 16 - shared + shared / ranks


def draw_memory(stages: list[Share]) -> "Figure":
    """Bars: bytes a weight on each of 1, 2, 4, 8 GPUs, counted; at their ends ZeRO's table."""
    bars, ends = {}, []
    for ranks in (1, 2, 4, 8):
        for number, share in enumerate(stages, 1):
            if ranks > 1 or number == 1:
                result = step(share, ranks)
                name = f"{ranks} GPUs, ZeRO-{number}" if ranks > 1 else "1 GPU"
                parts = ("weights", "gradients", "optimizer")
                bars[name] = {part: getattr(result, part) for part in parts}
                expected = table(number, ranks) if ranks > 1 else 16
                ends.append(f"table: {expected:g}")
    title = "Bytes a weight on each GPU: counted, and by ZeRO's table"
    return plots.stacked_bars(bars, "bytes a weight", title, totals=True, digits=1, ends=ends)


def draw_steps(steps: dict[str, StepResult]) -> "Figure":
    """A panel for each step: what the rank computes, and what it sends and receives."""
    figure = plots.figure(8, 0.6 + 1.5 * len(steps))
    longest = max(step.seconds for step in steps.values())
    for place, (name, step) in enumerate(steps.items(), 1):
        axes = figure.add_subplot(len(steps), 1, place)
        timeline = step.timeline
        timeline.lanes = timeline.lanes[:1]
        timeline.plot(axes, f"{name}: {1e3 * step.seconds:.0f} ms", _carried, longest)
    plots.share_legend(figure)
    return figure


def _carried(event: Event) -> str:
    return CARRIES.get(event.name, "")
