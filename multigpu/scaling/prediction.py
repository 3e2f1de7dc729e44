"""Predict a data-parallel step on n GPUs: its time, the speed-up, and what is lost where.

    prediction = predict("resnet50", "A100-80GB", "NVLink3", "HDR200", gpus=(1, 8, 64, 1024))
    print(report.table(prediction))

A GPU's computation comes from one virtual GPU (compute.py), the overlap of backward and the
all-reduces from step.py, the all-reduces' times from sim/network.py, the slowest rank
from stragglers.py, and the wait for data from loader.py.

The null model is linear: n GPUs are n times as fast as one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from multigpu.errors import UserError, any_of
from multigpu.scaling import cluster
from multigpu.scaling.compute import DTYPES, Compute
from multigpu.scaling.laws import efficiency
from multigpu.scaling.layers import profile_any
from multigpu.scaling.loader import Loader
from multigpu.scaling.measured import Measured, kernel_factor
from multigpu.scaling.shares import slowdowns
from multigpu.scaling.step import ddp_step
from multigpu.scaling.stragglers import SPREAD, slowest
from multigpu.scaling.workloads import Workload, find
from multigpu.virtual.sim.network import Group, Network, collective_seconds
from multigpu.virtual.sim.presets import GPUS, Gpu, Link, find_preset

# Scaling bends at the first number of GPUs whose efficiency is below this.
WORTH = 0.8

SMALL = "computing too small"
COPIES = "copies into buckets"
LATENCY = "latency of the all-reduces"
INSIDE = "bandwidth inside a node"
BETWEEN = "bandwidth between nodes"
STRAGGLERS = "stragglers"
INPUT = "input pipeline"


@dataclass(frozen=True)
class Estimate:
    """A step on n GPUs, predicted with one speed of the GPU.

    `speed_up` and `efficiency` compare with one GPU that never waits for data. `losses` has
    the seconds of the step that each cause adds to the ideal, 1/n of one GPU's time for the
    same samples; they add up to the difference.
    """

    seconds: float
    samples_per_s: float
    speed_up: float
    efficiency: float
    losses: dict[str, float]


@dataclass(frozen=True)
class Row:
    """The prediction for one number of GPUs, with one estimate for each speed of the GPU.

    `linear` is the null model's samples per second, by the first estimate. `memory` is the
    highest number of bytes on a GPU.
    """

    gpus: int
    per_gpu: int
    estimates: tuple[Estimate, ...]
    linear: float
    memory: int


@dataclass(frozen=True)
class Prediction:
    """Rows for growing numbers of GPUs, and what they were made for.

    `strong` says whether the global batch stays the same; otherwise each GPU's stays.
    `gradients` is the bytes of all gradients of one rank. The times of the GPU's kernels were
    multiplied by `factors`. There is one factor for each estimate of a row. After a
    measurement on one GPU there is one factor, which that measurement gave.
    """

    workload: Workload
    gpu: Gpu
    network: Network
    precision: str
    strong: bool
    spread: float
    gradients: int
    factors: tuple[float, ...]
    rows: tuple[Row, ...]
    measured: Measured | None = None


def predict(
    model: str,
    gpu: str | Gpu,
    link: str | Link,
    between_nodes: str | Link | None = None,
    gpus: Sequence[int] = (1, 8, 64, 1024),
    gpus_per_node: int | None = None,
    global_batch: int | None = None,
    per_gpu: int | None = None,
    precision: str = "fp32",
    spread: float = SPREAD,
    loader: Loader | None = None,
    times: Sequence[float] | None = None,
    measured: Measured | None = None,
) -> Prediction:
    """Predict a step of DDP for each number in `gpus`.

    The arguments are those of `multigpu scaling`: names of a model (workloads.py), a GPU and
    links (sim/presets.py), or a Gpu and Links of your own. `times` are factors of the
    kernels' times, such as simulated ÷ measured samples/s of one GPU; there is one estimate
    for each, and by default the factors are those of shares.py. `measured` is a step of one
    GPU, and gives the factor with which the simulated step takes as long. Raises UserError for
    a name that does not exist, and for numbers and topologies that are not possible.
    """
    workload = find(model)
    gpu = find_preset(gpu, GPUS)
    if precision not in DTYPES:
        raise UserError(f"--precision is {precision!r}: give {any_of(DTYPES)}.")
    if precision == "bf16" and not gpu.bf16:
        raise UserError(f"{gpu.name} has no units for bfloat16: use --precision fp16 or fp32.")
    if not 0 <= spread < 1:
        raise UserError(f"--spread is {spread}: give a fraction from 0 up to 1, such as 0.02.")
    if loader and (loader.workers < 0 or not loader.rate > 0):
        raise UserError(
            f"--workers {loader.workers} with --worker-rate {loader.rate:g} is not possible: "
            f"give workers from 0 up, and a rate greater than 0."
        )
    if times is not None and measured:
        raise UserError("give times or a measured step, not both: it decides the factor.")
    factors = slowdowns(gpu) if times is None else tuple(times)
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise UserError(
            f"times={list(factors)} is not possible: give at least one factor, each greater "
            f"than 0 and finite, such as times=(1.0,)."
        )
    joined = cluster.network(link, between_nodes, gpus_per_node)
    sizes = cluster.check_sizes(gpus, joined)
    per_gpus = cluster.split(sizes, global_batch, per_gpu, workload.batch)
    single_batch = global_batch or per_gpu or workload.batch
    batches = sorted({single_batch, *per_gpus.values()})
    if measured:
        factors = (kernel_factor(measured, workload, gpu, precision),)

    steps = profile_any(workload, gpu, batches, precision, factors)
    rows = []
    for count in sizes:
        group = joined.group(count)
        samples = per_gpus[count]
        estimates = [
            _estimate(compute, alone, group, spread, loader)
            for compute, alone in zip(steps[samples], steps[single_batch], strict=True)
        ]
        linear = count * single_batch / steps[single_batch][0].alone
        memory = steps[samples][0].memory
        rows.append(Row(count, samples, tuple(estimates), linear, memory))
    sent = sum(gradient.nbytes for gradient in steps[single_batch][0].gradients)
    return Prediction(
        workload,
        gpu,
        joined,
        precision,
        global_batch is not None,
        spread,
        sent,
        factors,
        tuple(rows),
        measured,
    )


def _estimate(
    compute: Compute, single: Compute, group: Group, spread: float, loader: Loader | None
) -> Estimate:
    """The step of `group`, whose ranks compute `compute`; a single GPU computes `single`.

    The causes are added one after the other, so their order decides how much of an overlap
    each of them gets.
    """
    slow = slowest(group.ranks, spread)
    ideal = single.alone * compute.samples / single.samples
    stages = {SMALL: compute.alone}
    if group.ranks == 1:
        stages |= dict.fromkeys(
            (COPIES, LATENCY, _bandwidth(group), STRAGGLERS), compute.alone
        )
    else:
        latency = collective_seconds("allreduce", 1, group)

        def seconds(nbytes: int) -> float:
            return collective_seconds("allreduce", nbytes, group)

        stages[COPIES] = ddp_step(compute, lambda nbytes: 0.0).seconds
        stages[LATENCY] = ddp_step(compute, lambda nbytes: latency).seconds
        stages[_bandwidth(group)] = ddp_step(compute, seconds).seconds
        stages[STRAGGLERS] = ddp_step(compute, seconds, slow).seconds
    ready = stages[STRAGGLERS]
    stages[INPUT] = loader.step_seconds(compute.samples, ready) if loader else ready
    losses = {}
    before = ideal
    for cause, until in stages.items():
        losses[cause] = until - before
        before = until
    speed_up = group.ranks * ideal / before
    return Estimate(
        before,
        group.ranks * compute.samples / before,
        speed_up,
        efficiency(speed_up, group.ranks),
        losses,
    )


def _bandwidth(group: Group) -> str:
    """The link that limits a ring of the group."""
    if group.nodes == 1:
        return INSIDE
    inside, between = group.bandwidths
    return INSIDE if inside < between else BETWEEN
