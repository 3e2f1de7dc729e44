"""The longer experiments of lesson 16: gradients of two ranks, and steps of a large GPT.

The large GPT is on virtual GPUs, with shapes only: times and memory are simulated.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import multigpu
from multigpu import launch, plots
from multigpu.course import find_root

sys.path.insert(0, str(find_root() / "scripts"))

import PT_GPT_TensorParallel as script
import tensor_parallel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# share(model, mesh) divides a model over the ranks; None leaves it to one process.
Share = Callable[[torch.nn.Module, DeviceMesh], None]
WAYS: dict[str, Share] = {**tensor_parallel.WAYS, "torch": script.share}
GIB = 2**30
GPU = "A100-80GB"
# Layers, hidden units, heads and tokens of a GPT with 0.8 billion weights; its vocabulary is
# the script's, so that nearly all work is in the blocks.
LAYERS, HIDDEN, HEADS, TOKENS = 4, 4096, 32, 2048
BATCH = 4
REDUCTION = "    add_gradients(model)\n"


# ---- on the CPU: gradients and losses of two ranks ------------------------------------------


def gradients(share: Share | None = None) -> dict[str, torch.Tensor]:
    """The whole gradient of each weight, of 8 digits, with the script's first weights."""
    torch.set_num_threads(1)
    tokens = script.read_tokens()[:8]
    torch.manual_seed(0)
    model = script.GPT(2, 48, 4)
    if share:
        share(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    with script.tp.loss_parallel():
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    by_name = {name: weight.grad for name, weight in model.named_parameters()}
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in by_name.items()
    }


def of_two_ranks(ways: dict[str, Share]) -> dict[str, list[dict[str, torch.Tensor]]]:
    """For each way the `gradients` of both ranks."""
    of_ranks = launch.call(_of_a_rank, 2, ways)
    return {way: [rank_gradients[way] for rank_gradients in of_ranks] for way in ways}


def _of_a_rank(ways: dict[str, Share]) -> dict[str, dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    by_way = {way: gradients(share) for way, share in ways.items()}
    dist.destroy_process_group()
    return by_way


def apart(
    gradients: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> dict[str, float]:
    """For each weight the largest difference, divided by the largest element of `other`."""
    return {
        name: ((gradients[name] - expected).abs().max() / expected.abs().max()).item()
        for name, expected in other.items()
    }


def worst(of_ranks: list[dict[str, torch.Tensor]], other: dict[str, torch.Tensor]) -> float:
    """The largest of `apart`, of all weights and ranks."""
    return max(max(apart(gradients, other).values()) for gradients in of_ranks)


def losses(ways: dict[str, Share], epochs: int = 2) -> dict[str, list[float]]:
    """For each way two ranks' mean loss of each epoch."""
    return launch.call(_losses, 2, ways, epochs)[0]


def _losses(ways: dict[str, Share], epochs: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = script.read_tokens()
    losses = {}
    for way, share in ways.items():
        torch.manual_seed(0)
        model = script.GPT(2, 48, 4)
        share(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.006, foreach=False)
        losses[way] = []
        for epoch in range(epochs):
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
            steps = order[: len(order) // 32 * 32].split(32)
            total = sum(script.train_step(model, optimizer, train[rows]) for rows in steps)
            losses[way].append(round(total.item() / len(steps), 3))
    dist.destroy_process_group()
    return losses


def without_the_reduction(path: str | Path) -> Path:
    """Write tensor_parallel.py without the call of add_gradients; returns the path."""
    path = Path(path)
    text = Path(tensor_parallel.__file__).read_text()
    assert REDUCTION in text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(REDUCTION, ""))
    return path


# ---- simulated: a step of the large GPT -----------------------------------------------------


class Step(NamedTuple):
    """A training step of rank 0, simulated.

    seconds   of the step
    alone     seconds in which a collective runs and nothing is computed
    kept      bytes of all activations at the end of forward
    forward   the names of forward's collectives
    """

    seconds: float
    alone: float
    kept: int
    forward: tuple[str, ...]


def one_gpu(half: bool = True) -> Step:
    """A step on one virtual A100; `half` computes in bf16, by autocast."""
    with multigpu.gpus(1, gpu=GPU, memory="1024GiB", shapes_only=True) as (gpu,):
        return _step(None, gpu, half)


def steps(ways: dict[str, Share], link: str = "NVLink3", half: bool = True) -> dict[str, Step]:
    """For each way a step on two virtual A100s, joined by `link`.

    A link of multigpu.NETWORKS joins two nodes with one of the GPUs each.
    """
    return launch.call(_steps, 2, ways, link, half)[0]


def _steps(ways: dict[str, Share], link: str, half: bool) -> dict[str, Step]:
    nodes = {"gpus_per_node": 1, "between_nodes": link}
    options = nodes if link in multigpu.NETWORKS else {"link": link}
    with multigpu.gpus(2, gpu=GPU, memory="1024GiB", shapes_only=True, **options) as gpus:
        dist.init_process_group("nccl")
        gpu = gpus[dist.get_rank()]
        torch.cuda.set_device(gpu)
        steps = {way: _step(share, gpu, half) for way, share in ways.items()}
        dist.destroy_process_group()
    return steps


def _step(share: Share | None, gpu: torch.device, half: bool) -> Step:
    with gpu:
        model = script.GPT(LAYERS, HIDDEN, HEADS, TOKENS)
        tokens = torch.zeros(BATCH, TOKENS + 1, dtype=torch.long)
    if share:
        share(model, init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):  # the first step makes the optimizer's state
        if share:
            dist.barrier(device_ids=[gpu.index])
        before, began = torch.cuda.memory_allocated(), multigpu.elapsed()
        with torch.autocast("cuda", torch.bfloat16, half):
            logits = model(tokens[:, :-1]).flatten(0, 1)
            kept = torch.cuda.memory_allocated() - before
            forward = multigpu.timeline(since=began)
            with script.tp.loss_parallel():
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = multigpu.elapsed() - began
    step = multigpu.timeline(since=began)
    busy = [step.busy(gpu.index if share else 0, kind) for kind in (None, "compute")]
    names = tuple(event.name for event in forward.events if event.kind == "collective")
    return Step(seconds, (busy[0] - busy[1]) * seconds, kept, names)


def draw_steps(steps: dict[str, Step], title: str) -> "Figure":
    """A bar for each step: milliseconds in which it computes, and in which it only sends."""
    bars = {
        name: {
            "compute": 1e3 * (step.seconds - step.alone),
            "collective": 1e3 * step.alone,
        }
        for name, step in steps.items()
    }
    first = next(iter(steps.values())).seconds
    ends = [
        f"{1e3 * step.seconds:.0f} ms, {first / step.seconds:.2f}×" for step in steps.values()
    ]
    return plots.stacked_bars(bars, "simulated ms of a step", title, totals=True, ends=ends)


def of_links(links: tuple[str, ...], share: Share = WAYS["tensor"]) -> dict[str, Step]:
    """A step on one GPU, and on two that each of `links` joins, by the link's name."""
    return {"one A100": one_gpu()} | {link: steps({link: share}, link)[link] for link in links}


def kept_by_a_block(ranks: int) -> dict[str, float]:
    """What a block of a rank keeps for backward in 32 bit, in tokens × hidden units, bytes.

    Two norms' inputs, qkv's and up's inputs; q, k, v, out's input, GELU's and down's inputs.
    """
    norms, enter, inside = 2 * 4, 2 * 4, (3 + 1 + 4 + 4) * 4
    return {
        "tensor": norms + enter + inside / ranks,
        "sequence": norms / ranks + enter + inside / ranks,
        "gathered again in backward": (norms + enter + inside) / ranks,
    }


def draw_kept(ranks: tuple[int, ...] = (1, 2, 4, 8)) -> "Figure":
    """GiB that a block of the large GPT keeps on each rank, by formula."""
    size = BATCH * TOKENS * HIDDEN / GIB
    curves = {
        way: [kept_by_a_block(number)[way] * size for number in ranks]
        for way in kept_by_a_block(1)
    }
    title = "What a block keeps on a rank, 4 × 2,048 tokens, 4,096 hidden units, 32 bit"
    return plots.lines(ranks, curves, "ranks", "GiB, by formula", title, level=None)
