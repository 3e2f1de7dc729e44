"""The longer experiments of lesson 17: layouts of a GPT with 6.9 billion weights, predicted.

    python lessons/17-mesh/experiments.py

runs `multigpu virtual --world` for each of LAYOUTS and PUBLISHED, one after the other, and
writes layouts.json. Times and memory are simulated.
"""

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from multigpu import launch, plots
from multigpu.course import find_root
from multigpu.files import write_json

sys.path.insert(0, str(find_root() / "scripts"))

import checkpoint
import PT_GPT_Mesh as script

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNCHANGED = SimpleNamespace()
HERE = Path(__file__).parent
FILE = HERE / "layouts.json"
CLUSTER = ("--gpus-per-node", 8, "--gpu", "A100-80GB", "--link", "NVLink3")
CLUSTER += ("--between-nodes", "HDR200")
PEAK = 312e12  # FLOP/s of an A100 in bfloat16
GIB = 2**30
LAYERS, HIDDEN, WORDS, LENGTH = 32, 4096, 51_200, 2048
WEIGHTS = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + (2 * WORDS + LENGTH + 2) * HIDDEN

# GPUs and sequences of a step; for each layout (stages, copies, shards, tensor) the sequences
# of a rank's micro-batch.
LAYOUTS = {
    (64, 512): {
        (1, 64, 1, 1): 4,
        (1, 1, 64, 1): 4,
        (1, 8, 8, 1): 2,
        (1, 1, 32, 2): 8,
        (1, 1, 8, 8): 8,
        (1, 1, 4, 16): 16,
        (2, 4, 8, 1): 4,
        (8, 1, 8, 1): 4,
        (2, 1, 16, 2): 4,
        (2, 1, 4, 8): 8,
    },
    (1024, 1024): {
        (1, 1024, 1, 1): 1,
        (1, 1, 1024, 1): 1,
        (1, 128, 8, 1): 1,
        (1, 16, 64, 1): 1,
        (1, 64, 8, 2): 2,
        (1, 16, 32, 2): 2,
        (1, 1, 128, 8): 8,
        (2, 64, 8, 1): 1,
        (8, 16, 8, 1): 1,
        (2, 1, 64, 8): 4,
    },
}
# Tensor parallelism inside the nodes, and with its ranks on eight nodes.
ORDERS = ("inside", "across")
# GPUs, layout, sequences of a step, of a micro-batch, their length; what was published:
# - mosaicml/llm-foundry, scripts/train/benchmarking/README.md: MPT-7B, 8 A100-80GB, FSDP, no
#   activation checkpointing: MFU 64.2%. Its micro-batch was 6; here 6 do not fit, because
#   FSDP2 adds up whole gradients in float32 over the micro-batches.
# - foundation-model-stack/fms-fsdp, README.md: Llama 2 7B, 128 A100s, HSDP, no activation
#   checkpointing, 2 sequences of 4,096 tokens on each: 3,760 tokens a second on each.
PUBLISHED = {
    "LLM Foundry, MPT-7B": (8, (1, 1, 8, 1), 96, 3, 2048),
    "FMS FSDP, Llama 2 7B": (128, (1, 16, 8, 1), 256, 2, 4096),
}


# ---- the small GPT on CPU processes ---------------------------------------------------------


def groups_of_torch(shape: tuple[int, ...], rank: int) -> dict[str, list[int]]:
    """A rank's groups in init_device_mesh's mesh, by the dimension's name.

    This process takes the rank's place; torch's fake backend has no other ranks, and sends
    nothing.
    """
    ranks = math.prod(shape)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=script.DIMENSIONS)
    groups = {
        name: dist.get_process_group_ranks(mesh.get_group(name)) for name in script.DIMENSIONS
    }
    dist.destroy_process_group()
    return groups


def train(
    shape: tuple[int, ...] = (1, 1, 1, 1),
    program: Any = UNCHANGED,
    steps: tuple[int, int] = (0, 3),
    load: str = "",
    save: str = "",
    at: int | None = None,
) -> dict[str, torch.Tensor]:
    """The weights after these steps of 16 digits each, in 64 bit, whole on every rank.

    `program` has functions that replace those of the same names in the script and in
    checkpoint.py. `load` and `save` are folders of checkpoints; it saves before step `at`.
    With several stages each rank returns the weights of its own.
    """
    torch.set_num_threads(1)
    # Its warning: a weight that FSDP and tensor parallelism divide is gathered in two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name, value in dict(
        RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0
    ).items():
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo")
    weights = make_steps(shape, program, steps, load, save, at)
    dist.destroy_process_group()
    return weights


def make_steps(
    shape: tuple[int, ...],
    program: Any = UNCHANGED,
    steps: tuple[int, int] = (0, 3),
    load: str = "",
    save: str = "",
    at: int | None = None,
) -> dict[str, torch.Tensor]:
    """`train` in a process group that there is."""
    program = SimpleNamespace(**vars(script) | vars(checkpoint) | vars(program))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=script.DIMENSIONS)
    index, copy, shard, _ = mesh.get_coordinate()
    torch.manual_seed(0)
    stage = program.keep_stage(script.GPT(2, 48, 4).double(), index, shape[0])
    program.divide(stage, mesh)
    optimizer = torch.optim.AdamW(stage.parameters(), 0.006, foreach=False)
    group = mesh.get_group("stages")
    pipe = PipelineStage(stage, index, shape[0], torch.device("cpu"), group=group)
    schedule = Schedule1F1B(pipe, 2, loss_fn=script.mean_loss)
    if load:
        program.load(stage, optimizer, load)
    data = script.read_tokens()
    for step in range(*steps):
        if save and step == at:
            program.save(stage, optimizer, save)
        rows = data[16 * step : 16 * step + 16][copy * shape[2] + shard :: shape[1] * shape[2]]
        program.train_step(schedule, stage, optimizer, rows)
    return {
        name: (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
        for name, weight in stage.named_parameters()
    }


def trained(
    shape: tuple[int, ...], program: Any = UNCHANGED, **options: object
) -> dict[str, torch.Tensor]:
    """`train` on as many processes as the mesh has ranks: the weights of all stages."""
    if "save" in options:
        shutil.rmtree(options["save"], ignore_errors=True)
    all_weights = {}
    for weights in launch.call(train, math.prod(shape), shape, program, **options):
        all_weights |= weights
    return all_weights


def apart(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    assert weights.keys() == other.keys()
    return max((weights[name] - other[name]).abs().max().item() for name in weights)


# ---- simulated: a large GPT -----------------------------------------------------------------


def predict(
    gpus: int,
    mesh: tuple[int, ...],
    batch: int,
    micro_batch: int,
    length: int = LENGTH,
    *more: object,
) -> dict:
    """The predicted step of a layout, and whether it fits.

    seconds   of the step, at the data sheet's peaks and at sourced efficiencies; None if it
              does not fit
    gib       the peak of the fullest rank that ran: the first one of each stage
    host      seconds of this machine's cores, and GiB of its largest process
    """
    ranks = [stage * gpus // mesh[0] for stage in range(mesh[0])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = [sys.executable, "-m", "multigpu.cli", "virtual", "--world", gpus]
        words += ["--as-rank", ",".join(map(str, ranks)), *CLUSTER, "--shapes-only"]
        words += ["--steps", 2, "--timeout", 300, "--json", file, HERE / "seven_billion.py"]
        words += ["--mesh", *mesh, "--batch", batch, "--micro-batch", micro_batch]
        words += ["--length", length, *more]
        with subprocess.Popen(
            [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as run:
            text = run.stdout.read().decode()
            _, status, used = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
        report = json.loads(file.read_text()) if file.exists() else {}
    fits = (report.get("fit") or {}).get("fits", True)
    if run.returncode and fits:
        raise RuntimeError(text)
    steps = ("step_at_peaks", "step")
    seconds = [report[name]["step_seconds"] for name in steps] if fits else None
    return {
        "gpus": gpus,
        "mesh": mesh,
        "batch": batch,
        "micro_batch": micro_batch,
        "length": length,
        "seconds": seconds,
        "gib": max(gpu["peak_reserved_bytes"] for gpu in report["gpus"]) / GIB,
        "host": [used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20],
    }


def predict_all() -> None:
    """Write layouts.json; prints each row."""
    predictions = {"layouts": [], "orders": {}, "published": {}}

    def row(*words: object) -> dict:
        prediction = predict(*words)
        print(prediction, flush=True)
        return prediction

    for (gpus, batch), layouts in LAYOUTS.items():
        for mesh, micro_batch in layouts.items():
            predictions["layouts"].append(row(gpus, mesh, batch, micro_batch))
    for order in ORDERS:
        predictions["orders"][order] = row(64, (1, 1, 8, 8), 128, 8, LENGTH, "--tensor", order)
    for name, words in PUBLISHED.items():
        predictions["published"][name] = row(*words)
    write_json(FILE, predictions)


def stored() -> dict:
    """What predict_all has written."""
    return json.loads(FILE.read_text())


def mfu(row: dict) -> list[float]:
    """The two predictions as model FLOPs utilization, by LLM Foundry's formula.

    It counts each weight once, and MPT's head is its embedding: ours has one embedding more.
    """
    tokens = row["batch"] * row["length"]
    flops = (
        3
        * tokens
        * (2 * (WEIGHTS - (WORDS + LENGTH) * HIDDEN) + 4 * LAYERS * HIDDEN * row["length"])
    )
    return [flops / seconds / row["gpus"] / PEAK for seconds in row["seconds"]]


def per_gpu(row: dict) -> list[float]:
    """The two predictions as tokens a second of each GPU."""
    tokens = row["batch"] * row["length"]
    return [tokens / seconds / row["gpus"] for seconds in row["seconds"]]


def best(gpus: int) -> dict:
    """The fastest layout of so many GPUs, at sourced efficiencies."""
    fitting = [row for row in stored()["layouts"] if row["gpus"] == gpus and row["seconds"]]
    return min(fitting, key=lambda row: row["seconds"][1])


def find(gpus: int, *mesh: int) -> dict:
    """The row of a layout."""
    rows = stored()["layouts"]
    return next(row for row in rows if (row["gpus"], row["mesh"]) == (gpus, list(mesh)))


# ---- the rule -------------------------------------------------------------------------------


def needs(mesh: tuple[int, ...], micro_batch: int = 1) -> float:
    """GiB of a rank, by formula: AdamW's 16 bytes a weight, what is whole, and activations.

    Whole are a stage's weights in bfloat16 and its gradients in float32, as they are added up
    over micro-batches. A block keeps 34 bytes for each token and hidden unit, of which tensor
    parallelism divides 24; logits and their gradients take 10 for each word of the vocabulary.
    The first stage keeps as many micro-batches as there are stages.
    """
    stages, _, shards, tensor = mesh
    weights = WEIGHTS / stages / tensor
    tokens = micro_batch * LENGTH
    blocks = tokens * HIDDEN * (10 + 24 / tensor) * LAYERS
    return (weights * (16 / shards + 6) + blocks + 10 * tokens * WORDS / tensor) / GIB


def choose(gpus: int, gib: float, per_node: int = 8) -> tuple[int, ...]:
    """The rule's layout for the GPT on GPUs with so much memory; prints why.

    Memory first, tensor parallelism within a node, then FSDP within a node, stages if that is
    not enough, and copies on all other GPUs.
    """
    stages, shards, tensor = 1, 1, 1
    print(f"one GPU needs {needs((1, 1, 1, 1)):.0f} GiB of {gib}")
    while needs((stages, 1, per_node // tensor, tensor)) > gib and tensor < per_node:
        tensor *= 2
        print(f"a sequence does not fit beside weights and gradients: tensor {tensor}")
    if needs((stages, 1, shards, tensor)) > gib and tensor < per_node:
        shards = per_node // tensor
        print(f"weights, gradients and AdamW's state do not fit: shards {shards}, in a node")
    while needs((stages, 1, shards, tensor)) > gib and stages < LAYERS:
        stages *= 2
        print(f"a node is too small: stages {stages}")
    copies, left = divmod(gpus, stages * shards * tensor)
    if left or not copies or needs((stages, 1, shards, tensor)) > gib:
        raise ValueError(f"the rule has no layout for {gpus} GPUs of {gib} GiB: give more")
    print(f"all other GPUs: copies {copies}")
    return stages, copies, shards, tensor


# ---- pictures -------------------------------------------------------------------------------


def draw_map(shapes: dict[str, tuple[dict[str, int], int]], per_node: int = 8) -> "Figure":
    """For each title a mesh (sizes by name, in the order of the ranks) and one of its ranks:
    whom this rank talks to, on a map of nodes.
    """
    figure = plots.figure(8, 0.5 + 2.6 * len(shapes))
    for place, (title, (sizes, rank)) in enumerate(shapes.items(), 1):
        axes = figure.add_subplot(len(shapes), 1, place)
        _draw_nodes(axes, title, _partners(sizes, rank), math.prod(sizes.values()), per_node)
    return figure


def draw_orders() -> "Figure":
    """Whom rank 0 of 64 talks to, with tensor as the last and as the first dimension."""
    last = {"stages": 2, "shards": 4, "tensor": 8}
    first = {"tensor": 8, "stages": 2, "shards": 4}
    return draw_map(
        {
            "tensor is the last dimension: its ranks are neighbours": (last, 0),
            "tensor is the first dimension: its ranks are on eight nodes": (first, 0),
        }
    )


def _partners(sizes: dict[str, int], rank: int) -> dict[int, str]:
    """For each rank that `rank` shares a group with, the name of the dimension."""
    ranks = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    place = [int(index) for index in (ranks == rank).nonzero()[0]]
    partners = {rank: "itself"}
    for dimension, name in enumerate(sizes):
        line = [slice(None) if i == dimension else place[i] for i in range(len(place))]
        partners |= {other: name for other in ranks[tuple(line)].tolist() if other != rank}
    return partners


COLORS = {
    "itself": (plots.BLACK, "white", ""),
    "tensor": (plots.BLUE, "white", ""),
    "shards": (plots.ORANGE, "black", "///"),
    "copies": (plots.GREEN, "black", "..."),
    "stages": (plots.PURPLE, "black", "xxx"),
}


def _draw_nodes(
    axes: "Axes", title: str, partners: dict[int, str], ranks: int, per_node: int
) -> None:
    from matplotlib.patches import Patch, Rectangle

    columns = 4
    for rank in range(ranks):
        node, gpu = divmod(rank, per_node)
        x = node % columns * 5 + gpu % 4
        y = -(node // columns) * 3 - gpu // 4
        fill, text, hatch = COLORS.get(partners.get(rank, ""), (plots.GREY, "black", ""))
        box = Rectangle((x, y), 0.9, 0.9, facecolor=fill, edgecolor=plots.EDGE, hatch=hatch)
        axes.add_patch(box)
        back = {"facecolor": fill, "edgecolor": "none", "pad": 0.5} if hatch else None
        axes.text(
            x + 0.45,
            y + 0.45,
            f"{rank}",
            color=text,
            ha="center",
            va="center",
            size=7,
            bbox=back,
        )
        if gpu == 0:
            outline = Rectangle((x - 0.1, y - 1.1), 4.1, 2.1, fill=False, edgecolor=plots.INK)
            axes.add_patch(outline)
            axes.text(x, y + 1.1, f"node {node}", size=8)
    rows = math.ceil(ranks / per_node / columns)
    axes.set(
        xlim=(-0.3, columns * 5), ylim=(-3 * rows + 1.5, 1.8), aspect="equal", title=title
    )
    axes.axis("off")
    names = [name for name in COLORS if name in partners.values()]
    looks = [COLORS[name] for name in names]
    handles = [
        Patch(facecolor=fill, edgecolor=plots.EDGE, hatch=hatch, label=name)
        for name, (fill, _, hatch) in zip(names, looks, strict=True)
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_layouts(gpus: int) -> "Figure":
    """The layouts of so many GPUs, the fastest first: predicted tokens a second, as ranges."""
    rows = [row for row in stored()["layouts"] if row["gpus"] == gpus]
    rows.sort(key=lambda row: row["seconds"][1] if row["seconds"] else math.inf)
    figure = plots.figure(8, 3.6)
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        if row["seconds"]:
            fast, slow = per_gpu(row)
            axes.plot(
                [slow, fast], [-place] * 2, color=plots.BLUE, lw=6, solid_capstyle="butt"
            )
            axes.text(fast + 70, -place, f"{row['gib']:.0f} GiB", va="center", size=8)
        else:
            axes.text(60, -place, "does not fit into 80 GiB", va="center", size=8)
    labels = [" × ".join(map(str, row["mesh"])) for row in rows]
    axes.set_yticks([-place for place in range(len(rows))], labels)
    title = f"A GPT with 6.9 billion weights on {gpus:,} A100s (simulated)"
    axes.set(
        xlim=(0, 7500),
        ylim=(0.4 - len(rows), 0.6),
        xlabel="tokens a second of each GPU: predicted range",
        title=title,
    )
    axes.set_ylabel("stages × copies × shards × tensor")
    return figure


if __name__ == "__main__":
    predict_all()
