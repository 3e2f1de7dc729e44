"""The longer experiments of lesson 13: measured steps, published clusters, the guide."""

import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import multigpu
from multigpu import launch, plots
from multigpu.errors import pluralize
from multigpu.models import CNN
from multigpu.scaling import Measured, Prediction, laws, predict
from multigpu.scaling.measured import kernel_factor
from multigpu.scaling.prediction import BETWEEN, INSIDE, WORTH
from multigpu.scaling.workloads import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- measured -------------------------------------------------------------------------------

RANKS = (1, 2, 4)
Point = tuple[str, int]  # "strong", "weak" or "silent", and the number of processes


def measured_steps(images: int, rounds: int) -> dict[Point, list[float]]:
    """Seconds of a training step of the CNN on 28×28 images, for each case and round.

    strong   all processes share `images` images
    weak     each process has `images` images
    silent   as strong, but no gradient is averaged: what this machine gives at most

    Four processes start once and measure all cases in each round, one after the other;
    processes that a case does not need wait. The first round warms up and is not returned.
    """
    by_rank = launch.call(_measure, max(RANKS), images, rounds + 1)
    return {case: seconds[1:] for case, seconds in by_rank[0].items()}


def _measure(images: int, rounds: int) -> dict[Point, list[float]]:
    """In each rank: this rank's seconds of the cases in which it takes part."""
    torch.set_num_threads(1)
    rank = launch.find_world().rank
    dist.init_process_group("gloo")
    # Every rank has to take part in making every group.
    groups = {n: dist.new_group(range(n)) for n in RANKS}
    models = {}
    for n in RANKS:
        if rank < n:
            torch.manual_seed(0)
            models[n] = DDP(CNN((1, 28, 28)), process_group=groups[n])
    cases = [(kind, n) for kind in ("strong", "weak", "silent") for n in RANKS]
    seconds: dict[Point, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for kind, n in cases:
            rank_images = images // n if kind != "weak" else images
            dist.barrier()
            if rank < n:
                seconds[kind, n].append(
                    _step(models[n], rank_images, groups[n], kind == "silent")
                )
    dist.barrier()
    models.clear()  # before their groups: DDP can hang if it drops the last reference
    dist.destroy_process_group()
    return seconds


def _step(model: DDP, images: int, group: dist.ProcessGroup, silent: bool) -> float:
    """Seconds of one step, until the last process of the group has ended it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    pixels = torch.zeros(images, 1, 28, 28)
    labels = torch.zeros(images, dtype=torch.long)
    dist.barrier(group)
    began = time.perf_counter()
    with model.no_sync() if silent else nullcontext():
        F.cross_entropy(model(pixels), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier(group)
    return time.perf_counter() - began


def speed_ups(steps: dict[Point, list[float]], kind: str) -> dict[int, float]:
    """images/s of 1, 2 and 4 processes ÷ those of one, by the shortest steps of this kind."""
    shortest = min(steps[kind, 1])
    return {n: (n if kind == "weak" else 1) * shortest / min(steps[kind, n]) for n in RANKS}


def print_steps(steps: dict[Point, list[float]]) -> None:
    """A row for each kind and number of processes: shortest and longest step, speed-up."""
    print("kind    processes   ms per step   times as fast")
    for kind in ("strong", "weak", "silent"):
        for n, ratio in speed_ups(steps, kind).items():
            shortest, longest = 1e3 * min(steps[kind, n]), 1e3 * max(steps[kind, n])
            print(f"{kind:<7} {n:>9}   {shortest:>3.0f} to {longest:>4.0f}   {ratio:>12.2f}×")


def draw_fit(strong: dict[int, float], weak: dict[int, float], share: float) -> "Figure":
    """Measured speed-ups, and those of Amdahl's law with this serial share."""
    fitted = f"Amdahl, {share:.0%} serial"
    curves = {
        "linear": list(strong),
        "strong, measured": list(strong.values()),
        fitted: [laws.amdahl(share, n) for n in strong],
        "weak, measured": list(weak.values()),
    }
    title = f"{max(strong)} processes are {strong[max(strong)]:.1f} times as fast as one"
    axes = ("processes", "times as fast")
    return plots.lines(list(strong), curves, *axes, title, level=None, dashed=fitted)


# ---- predicted ------------------------------------------------------------------------------

COUNTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
CLUSTER = {"gpu": "A100-80GB", "link": "NVLink3", "between_nodes": "HDR200"}


def read_rows(path: str | Path) -> dict[int, dict]:
    """The rows that `multigpu scaling --json` wrote, by the number of GPUs.

    A row's estimate (seconds, speed_up, efficiency, losses_s) is merged into it.
    """
    rows = json.loads(Path(path).read_text())["rows"]
    return {row["gpus"]: {**row, **row["estimates"][0]} for row in rows}


def draw_parts(rows: dict[int, dict], counts: Sequence[int]) -> "Figure":
    """The parts of a step in %, for some numbers of GPUs: the ideal time, and each loss."""
    bars, ends = {}, []
    for n in counts:
        row = rows[n]
        parts = {"ideal": 100 * row["efficiency"]}
        for cause, seconds in row["losses_s"].items():
            if seconds:
                parts[cause] = 100 * seconds / row["seconds"]
        bars[f"{n:,} GPUs"] = parts
        ends.append(f"{1e3 * row['seconds']:,.1f} ms")
    last = bars[f"{counts[-1]:,} GPUs"]
    share = last["computing too small"] + last["copies into buckets"]
    title = f"{row['per_gpu']} images on each of {counts[-1]:,} GPUs: "
    title += f"{share:.0f}% of a step is small kernels and copies"
    unit = "% of a step; at the end of a bar: a step's time; simulated"
    return plots.stacked_bars(bars, unit, title, totals=True, ends=ends)


def causes(networks: dict[str, str]) -> dict[str, tuple[int, str]]:
    """For each model and its network: the GPUs with which it bends, and what costs most there.

    A100s, 8 a node, with 64 images a GPU (the small CNN: 32), on 1 to 1,024 GPUs.
    """
    bends = {}
    for model, network in networks.items():
        cluster = {**CLUSTER, "between_nodes": network, "gpus": COUNTS}
        for row in predict(model, **cluster, per_gpu=32 if model == "cnn" else 64).rows:
            (estimate,) = row.estimates
            if estimate.efficiency < WORTH:
                bends[model] = (row.gpus, max(estimate.losses, key=estimate.losses.get))
                break
    return bends


def efficiency_on(gpu: str, gpus: int = 64) -> float:
    """VGG-16's efficiency with 64 images a GPU, 25 Gb/s between nodes, NVLink3 inside."""
    (row,) = predict("vgg16", gpu, "NVLink3", "Ethernet25", gpus=(gpus,), per_gpu=64).rows
    return row.estimates[0].efficiency


def serial_shares(spread: float) -> tuple[dict[int, float], dict[int, float]]:
    """({GPUs: speed-up}, {GPUs: Amdahl's serial share, solved for this point alone}).

    ResNet-50 with 8,192 images in a step. `spread` is the stragglers' standard deviation.
    """
    rows = predict("resnet50", **CLUSTER, gpus=COUNTS, global_batch=8192, spread=spread).rows
    ratios = {row.gpus: row.estimates[0].speed_up for row in rows}
    return ratios, {n: laws.fit_amdahl([n], [ratios[n]]) for n in COUNTS[1:]}


def draw_shares(shares: dict[str, dict[int, float]]) -> "Figure":
    """The serial share by the number of GPUs; shares[name][GPUs]."""
    curves = {name: [100 * share for share in by.values()] for name, by in shares.items()}
    title = "Most of what 8 GPUs lose is the assumed stragglers"
    label = "serial share in %, simulated"
    return plots.lines(COUNTS[1:], curves, "GPUs", label, title, level=None)


def queue_and_run(
    queue_hours: dict[int, float], hours: float, rows: dict[int, dict]
) -> dict[int, float]:
    """Hours until the result by the number of GPUs, printed too; `hours` is one GPU's time."""
    totals = {}
    for n, queue in queue_hours.items():
        run = hours / rows[n]["speed_up"]
        totals[n] = queue + run
        print(
            f"{n:>4} GPUs: {queue:4.1f} h queue + {run:4.1f} h run = {totals[n]:4.1f} h, "
            f"{n * run:.0f} GPU hours"
        )
    return totals


# ---- published ------------------------------------------------------------------------------

# NVIDIA Tesla P100 data sheet (2016), SXM2: 5.3 / 10.6 / 21.2 TFLOP/s, 732 GB/s.
P100 = multigpu.Gpu(
    name="P100-16GB",
    memory=16 * 2**30,
    bandwidth=732e9,
    fp64=5.3e12,
    fp32=10.6e12,
    tf32=10.6e12,
    fp16=21.2e12,
    host="PCIe3",
    bf16=False,
)
# NVIDIA Tesla P100 whitepaper (2016): four links of 20 GB/s in each direction.
NVLINK1 = multigpu.Link("NVLink1", 80e9, 3.4e-6)
A100_40GB = multigpu.GPUS["A100-40GB"]

# Published samples/s of one GPU. [TF] TensorFlow's benchmarks of 2017 (tensorflow/docs_src/
# performance/benchmarks.md), DGX-1, synthetic data. [M20] Megatron-LM's table of 2020: 16
# sequences in 1,076 ms, with recomputation, which adds a second forward: 4/3 of the work.
MEGATRON = "gpt:24x1920x15x1024"
ONE_GPU = {
    # name: (model, GPU, precision, samples of a step, published samples/s, work ÷ simulated)
    "ResNet-50, P100 [TF]": ("resnet50", P100, "fp32", 64, 219.0, 1.0),
    "ResNet-152, P100 [TF]": ("resnet152", P100, "fp32", 64, 91.8, 1.0),
    "VGG-16, P100 [TF]": ("vgg16", P100, "fp32", 64, 154.0, 1.0),
    "VGG-16, 32 images, P100 [TF]": ("vgg16", P100, "fp32", 32, 144.0, 1.0),
    "GPT 1.2B, A100 [M20]": (MEGATRON, A100_40GB, "fp16", 16, 16 / 1.076, 4 / 3),
}


@dataclass(frozen=True)
class Published:
    """A published scaling efficiency, and what is needed to predict it.

    calibrated   names in ONE_GPU: the GPU's speed is the mean of what they reach
    """

    name: str
    model: str
    gpu: multigpu.Gpu
    link: str | multigpu.Link
    between: str | None
    per_node: int | None
    gpus: int
    per_gpu: int
    precision: str
    calibrated: tuple[str, ...]
    efficiency: float


# [H] Horovod, docs/benchmarks.rst: 128 servers with four Pascal GPUs, 25 Gb/s RoCE. It names
# neither the GPU's model nor its link: here P100 and PCIe 3.
HOROVOD = (P100, "PCIe3", "Ethernet25", 4, 512, 64, "fp32")
RESNETS = ("ResNet-50, P100 [TF]", "ResNet-152, P100 [TF]")
DGX1 = (P100, NVLINK1, None, None, 8)
PUBLISHED = (
    Published("ResNet-101, 512 GPUs [H]", "resnet101", *HOROVOD, RESNETS, 0.90),
    Published("VGG-16, 512 GPUs [H]", "vgg16", *HOROVOD, ("VGG-16, P100 [TF]",), 0.68),
    Published(
        "VGG-16, 8 GPUs [TF]", "vgg16", *DGX1, 64, "fp32", ("VGG-16, P100 [TF]",),
        1081 / (8 * 154),
    ),
    Published(
        "VGG-16, 32 images, 8 GPUs [TF]", "vgg16", *DGX1, 32, "fp32",
        ("VGG-16, 32 images, P100 [TF]",), 820 / (8 * 144),
    ),
    Published(
        "GPT 1.2B, 128 GPUs [M20]", MEGATRON, A100_40GB, "NVLink3", "HDR200", 8, 128, 16,
        "fp16", ("GPT 1.2B, A100 [M20]",), 1076 / 1153,
    ),
)  # fmt: skip


def factor(name: str) -> float:
    """The factor of the kernels' times that a published step of one GPU gives.

    `multigpu scaling --step-ms` computes it in the same way.
    """
    model, gpu, precision, samples, published, _ = ONE_GPU[name]
    step = Measured(samples / published, samples)
    return kernel_factor(step, find(model), gpu, precision)


def published_rows(
    rows: Iterable[Published] = PUBLISHED, calibrate: bool = True
) -> dict[str, tuple[float, float, str]]:
    """For each published efficiency: it, the predicted one, and the cause that costs most.

    The GPU's speed is calibrated on published times of one GPU, which are not among the rows.
    Without `calibrate` it is the simulated speed, as without `--step-ms`.
    """
    efficiencies = {}
    for row in rows:
        factors = [factor(name) if calibrate else 1.0 for name in row.calibrated]
        (prediction,) = predict(
            row.model,
            row.gpu,
            row.link,
            row.between,
            gpus=(row.gpus,),
            gpus_per_node=row.per_node,
            per_gpu=row.per_gpu,
            precision=row.precision,
            times=(sum(factors) / len(factors),),
        ).rows
        (estimate,) = prediction.estimates
        cause = max(estimate.losses, key=estimate.losses.get)
        efficiencies[row.name] = (row.efficiency, estimate.efficiency, cause)
    return efficiencies


def published_table() -> dict:
    """benchmarks/scaling.json: all rows, the errors and those of the null models. Printed."""
    path = Path(__file__).parents[2] / "benchmarks" / "scaling.json"
    table = json.loads(path.read_text())
    print(f"{'':<32} published   predicted   with no GPU measured")
    for row in table["rows"]:
        shares = (row["published"], row["predicted"], row["uncalibrated"])
        print(f"{row['name']:<32} {shares[0]:>9.0%}   {shares[1]:>9.0%}   {shares[2]:>9.0%}")
    models = {
        "predicted, one GPU measured": "error",
        "predicted, no GPU measured": "uncalibrated_error",
        "linear": "null_error",
        f"always {table['constant']:.0%}, the median of all five": "constant_error",
        "the median of the other four": "others_error",
    }
    for model, key in models.items():
        print(f"mean error, {model}: {100 * table[key]:.0f} points")
    return table


# ---- the guide ------------------------------------------------------------------------------

GIB = 2**30
# fp32 weights and gradients, and Adam's two numbers: lesson 03.
ADAM_BYTES = 16


@dataclass(frozen=True)
class Case:
    """A training that someone plans: the model, the samples of a step, the cluster."""

    model: str
    batch: int
    gpus: int
    gpu: str = "A100-80GB"
    link: str = "NVLink3"
    between: str = "HDR200"
    per_node: int = 8
    precision: str = "bf16"


# The trainings of the notebook.
CASES = {
    "the course's CNN, 64 images a step": Case("cnn", 64, gpus=8),
    "ResNet-50, 256 images a step": Case("resnet50", 256, gpus=1),
    "ResNet-50, 8,192 images a step": Case("resnet50", 8192, gpus=64),
    "VGG-16, 4,096 images a step, 10 Gb/s": Case("vgg16", 4096, gpus=64, between="Ethernet10"),
    "BERT-large, 4,096 sequences a step": Case("bert:large", 4096, gpus=8),
    "GPT, 1.7e9 weights, 512 sequences a step": Case("gpt:24x2304x24", 512, gpus=32),
    "GPT, 22e9 weights, 512 sequences a step": Case("gpt:48x6144x48", 512, gpus=64),
}


def print_guide(cases: dict[str, Case]) -> None:
    """For each case: the lesson's method, and the computed reason."""
    for name, case in cases.items():
        method, reason = guide(case)
        print(f"{name}, {pluralize(case.gpus, 'GPU')}\n    {method} ({reason})")


def guide(case: Case) -> tuple[str, str]:
    """Which lesson's method fits the case, and the computed reason.

    What is computed for FSDP is the part of weights, gradients and Adam's numbers that a GPU
    keeps. Its activations and the layer that it has gathered come on top. Its time is not
    computed: `multigpu scaling` models DDP, and `multigpu virtual --world` simulates FSDP.
    """
    memory = multigpu.GPUS[case.gpu].memory

    def on_one(samples: int, precision: str = case.precision) -> Prediction:
        sizes = {"gpus": (1,), "per_gpu": samples}
        return predict(case.model, case.gpu, case.link, **sizes, precision=precision)

    per_gpu = max(1, case.batch // case.gpus)
    whole = on_one(per_gpu)
    weights = whole.gradients // 4
    needed = ADAM_BYTES * weights
    if needed > memory:
        stages = math.ceil(needed / memory)
        state = f"{weights / 1e9:.1f}e9 × 16 B = {needed / GIB:,.0f} GiB"
        if stages > case.gpus:
            return f"at least {stages} GPUs", f"{state}, more than {case.gpus} GPUs have"
        # Replicas of equal size use all GPUs.
        stages = next(n for n in range(stages, case.gpus + 1) if case.gpus % n == 0)
        # Both only divide the weights: which is faster depends on the network (lesson 06).
        several = case.gpus > stages
        other = f"replicas of {stages} stages" if several else f"03: {stages} stages"
        shard = f"FSDP: {needed / case.gpus / GIB:,.1f} GiB + activations"
        return f"15: FSDP, or {other}", f"{state}; {shard}"
    held = whole.rows[0].memory
    if held > memory:
        most = per_gpu
        while most and on_one(most).rows[0].memory > memory:
            most = most // 2
        if not most:
            least = on_one(1).rows[0].memory / GIB
            alone = f"one {whole.workload.sample} alone needs {least:,.0f} GiB"
            return "15: FSDP, with checkpointing (14)", f"{alone} in {case.precision}"
        parts = math.ceil(per_gpu / most)
        need = f"{held / GIB:,.0f} GiB in {case.precision}"
        if case.precision != "fp32":
            exact = on_one(per_gpu, "fp32").rows[0].memory
            need = f"{exact / GIB:,.0f} GiB in fp32, {need}"
        reason = f"{pluralize(per_gpu, whole.workload.sample)} need {need}; {most} fit"
        return f"05: DDP, --accumulate {parts}", reason
    if case.gpus == 1:
        return "01: one GPU", f"{held / GIB:.1f} of {memory / GIB:.0f} GiB, nothing to send"
    last = _on_cluster(case, (case.gpus,)).rows[-1].estimates[0]
    if last.efficiency >= WORTH:
        return "05: DDP", f"{last.efficiency:.0%} efficiency on {case.gpus} GPUs"
    cause = max(last.losses, key=last.losses.get)
    if cause in (INSIDE, BETWEEN):
        method = "10: send less, or a larger batch"
    else:
        counts = [case.gpus // 4**n for n in range(6) if case.gpus % 4**n == 0]
        rows = _on_cluster(case, counts).rows
        most = max(
            (row.gpus for row in rows if row.estimates[0].efficiency >= WORTH), default=1
        )
        method = "01: one GPU" if most == 1 else f"05: DDP on {most} GPUs"
        method += ", or a larger batch"
    reason = f"{last.efficiency:.0%} efficiency on {pluralize(case.gpus, 'GPU')}: {cause}"
    return method, reason


def _on_cluster(case: Case, gpus: Sequence[int]) -> Prediction:
    """The case's step on each number of GPUs, strong scaling."""
    nodes = {}
    if case.gpus > case.per_node:
        nodes = {"between_nodes": case.between, "gpus_per_node": case.per_node}
    return predict(
        case.model,
        case.gpu,
        case.link,
        **nodes,
        gpus=gpus,
        global_batch=case.batch,
        precision=case.precision,
    )
