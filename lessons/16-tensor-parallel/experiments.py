"""The longer experiments of lesson 16: gradients of two ranks, and steps of a large GPT.

The large GPT is on virtual GPUs, with shapes only: times and memory are simulated.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import multigpu
from multigpu import launch, plots
from multigpu.course import find_root

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
WAYS = ("tensor", "sequence", "torch")
GPU = "A100-80GB"
# Layers, hidden units, heads and tokens of a GPT with 0.8 billion weights; its vocabulary is
# the script's, so that nearly all work is in the blocks.
LAYERS, HIDDEN, HEADS, TOKENS = 4, 4096, 32, 2048
BATCH = 4
REDUCTION = "    if sequence:\n        add_gradients(model)\n"


def _script() -> ModuleType:
    """scripts/PT_GPT_TensorParallel.py as a module."""
    path = find_root() / "scripts" / "PT_GPT_TensorParallel.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


def share(model: torch.nn.Module, way: str, device: str = "cpu") -> None:
    """Divide a model over the ranks of this run, as the script's --way."""
    mesh = script.init_device_mesh(device, (dist.get_world_size(),))
    if way == "torch":
        script.share_with_torch(model, mesh)
    else:
        script.share(model, mesh, sequence=way != "tensor")


# ---- on the CPU: gradients and losses of two ranks ------------------------------------------


def gradients(way: str = "one") -> dict[str, torch.Tensor]:
    """The whole gradient of each weight, of 8 digits, with the script's first weights.

    way   "one" process, one of WAYS, or "forgotten": sequence parallelism without the sum of
          the norms' gradients
    """
    torch.set_num_threads(1)
    tokens = script.read_tokens()[:8]
    torch.manual_seed(0)
    model = script.GPT(2, 48, 4)
    if way != "one":
        share(model, way)
    logits = model(tokens[:, :-1]).flatten(0, 1)
    with script.tp.loss_parallel():
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    if way == "sequence":
        script.add_gradients(model)
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in found.items()
    }


def of_two_ranks(*ways: str) -> dict[str, list[dict[str, torch.Tensor]]]:
    """For each way the `gradients` of both ranks."""
    of_ranks = launch.call(_of_a_rank, 2, ways)
    return {way: [found[way] for found in of_ranks] for way in ways}


def _of_a_rank(ways: tuple[str, ...]) -> dict[str, dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    found = {way: gradients(way) for way in ways}
    dist.destroy_process_group()
    return found


def apart(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """For each weight the largest difference, divided by the largest element of `other`."""
    return {
        name: ((found[name] - one).abs().max() / one.abs().max()).item()
        for name, one in other.items()
    }


def worst(of_ranks: list[dict[str, torch.Tensor]], other: dict[str, torch.Tensor]) -> float:
    """The largest of `apart`, of all weights and ranks."""
    return max(max(apart(found, other).values()) for found in of_ranks)


def losses(epochs: int = 2) -> dict[str, list[float]]:
    """Two ranks' mean loss of each epoch, with the sum of the norms' gradients and without."""
    return launch.call(_losses, 2, epochs)[0]


def _losses(epochs: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = script.read_tokens()
    found = {}
    for way in ("sequence", "forgotten"):
        if way == "forgotten":
            script.add_gradients = lambda model: None
        torch.manual_seed(0)
        model = script.GPT(2, 48, 4)
        share(model, way)
        optimizer = torch.optim.AdamW(model.parameters(), 0.006, foreach=False)
        found[way] = []
        for epoch in range(epochs):
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
            steps = order[: len(order) // 32 * 32].split(32)
            total = sum(
                script.train_step(model, optimizer, train[rows], True) for rows in steps
            )
            found[way].append(round(total.item() / len(steps), 3))
    dist.destroy_process_group()
    return found


def without_the_reduction(path: str | Path) -> Path:
    """Write the script without the call of add_gradients; returns the path."""
    path = Path(path)
    text = (find_root() / "scripts" / "PT_GPT_TensorParallel.py").read_text()
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
        return _step("one", gpu, half)


def steps(
    ways: tuple[str, ...] = WAYS, link: str = "NVLink3", half: bool = True
) -> dict[str, Step]:
    """For each way a step on two virtual A100s, joined by `link`.

    A link of multigpu.NETWORKS joins two nodes with one of the GPUs each.
    """
    return launch.call(_steps, 2, ways, link, half)[0]


def _steps(ways: tuple[str, ...], link: str, half: bool) -> dict[str, Step]:
    nodes = {"gpus_per_node": 1, "between_nodes": link}
    options = nodes if link in multigpu.NETWORKS else {"link": link}
    with multigpu.gpus(2, gpu=GPU, memory="1024GiB", shapes_only=True, **options) as gpus:
        dist.init_process_group("nccl")
        gpu = gpus[dist.get_rank()]
        torch.cuda.set_device(gpu)
        found = {way: _step(way, gpu, half) for way in ways}
        dist.destroy_process_group()
    return found


def _step(way: str, gpu: torch.device, half: bool) -> Step:
    with gpu:
        model = script.GPT(LAYERS, HIDDEN, HEADS, TOKENS)
        tokens = torch.zeros(BATCH, TOKENS + 1, dtype=torch.long)
    if way != "one":
        share(model, way, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):  # the first step makes the optimizer's state
        if way != "one":
            dist.barrier(device_ids=[gpu.index])
        before, began = torch.cuda.memory_allocated(), multigpu.elapsed()
        with torch.autocast("cuda", torch.bfloat16, half):
            logits = model(tokens[:, :-1]).flatten(0, 1)
            kept = torch.cuda.memory_allocated() - before
            forward = multigpu.timeline(since=began)
            with script.tp.loss_parallel():
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
                loss.backward()
        if way == "sequence":
            script.add_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        seconds = multigpu.elapsed() - began
    step = multigpu.timeline(since=began)
    busy = [step.busy(0 if way == "one" else gpu.index, kind) for kind in (None, "compute")]
    names = tuple(event.name for event in forward.events if event.kind == "collective")
    return Step(seconds, (busy[0] - busy[1]) * seconds, kept, names)


def draw_steps(found: dict[str, Step], title: str) -> "Figure":
    """A bar for each step: milliseconds in which it computes, and in which it only sends."""
    bars = {
        name: {
            "compute": 1e3 * (step.seconds - step.alone),
            "collective": 1e3 * step.alone,
        }
        for name, step in found.items()
    }
    first = next(iter(found.values())).seconds
    ends = [
        f"{1e3 * step.seconds:.0f} ms, {first / step.seconds:.2f}×" for step in found.values()
    ]
    return plots.stacked_bars(bars, "simulated ms of a step", title, totals=True, ends=ends)


def of_links(links: tuple[str, ...], way: str = "tensor") -> dict[str, Step]:
    """A step on one GPU, and on two that each of `links` joins, by the link's name."""
    return {"one A100": one_gpu()} | {link: steps((way,), link)[way] for link in links}


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
