"""A prediction as text and as JSON."""

import textwrap
from collections.abc import Callable
from typing import Any

from multigpu.errors import pluralize
from multigpu.scaling.prediction import INPUT, WORTH, Estimate, Prediction, Row
from multigpu.scaling.shares import slowdowns
from multigpu.virtual.sim.presets import GIB


def text(prediction: Prediction) -> str:
    """The prediction: what it is for, the table, where scaling bends and why."""
    parts = [heading(prediction), table(prediction), *sentences(prediction)]
    return "\n".join(parts)


def heading(prediction: Prediction) -> str:
    """Two lines: the workload, and the simulated cluster."""
    workload = prediction.workload
    rows = prediction.rows
    if prediction.strong:
        batch = pluralize(rows[0].gpus * rows[0].per_gpu, workload.sample)
        kind = f"strong scaling, {batch} in a step of all GPUs"
    else:
        kind = f"weak scaling, {pluralize(rows[0].per_gpu, workload.sample)} on each GPU"
    sent = prediction.gradients / 1e6
    gpus = f"simulated: {prediction.gpu.name}, {prediction.network.label()}"
    most = rows[-1].gpus
    if prediction.network.between is None and most > 1:
        gpus += f", one node of {most} GPUs"
    first = f"{workload.name} in {prediction.precision}: {kind}; {sent:,.1f} MB of gradients"
    return f"{first}\n{gpus}"


def table(prediction: Prediction) -> str:
    """One line for each number of GPUs; a range where a GPU has two speeds."""
    unit = f"{prediction.workload.sample}s/s"
    head = ("GPUs", "per GPU", "ms per step", unit, "linear", "speed-up", "efficiency")
    lines = [head]
    for row in prediction.rows:
        estimates = row.estimates
        lines.append(
            (
                f"{row.gpus:,}",
                f"{row.per_gpu:,}",
                _range(estimates, lambda estimate: _digits(1e3 * estimate.seconds)),
                _range(estimates, lambda estimate: _digits(estimate.samples_per_s)),
                _digits(row.linear),
                _range(estimates, lambda estimate: _digits(estimate.speed_up)),
                _range(estimates, lambda estimate: f"{estimate.efficiency:.0%}"),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def sentences(prediction: Prediction) -> list[str]:
    """Where scaling bends and what bends it, what the range is, and what does not fit."""
    gpu = prediction.gpu
    sample = prediction.workload.sample
    factors = prediction.factors
    said = []
    for number in range(len(factors)):
        at = f"at {speed_name(prediction, number)}: " if len(factors) > 1 else ""
        said.append(at + bend(prediction, number))
    if len(factors) > 1:
        speeds = [speed_name(prediction, number) for number in range(len(factors))]
        reason = ""
        if not gpu.shares and factors == slowdowns(gpu):
            reason = f"{gpu.name} has no published efficiencies here, so "
        times = f"there are {len(factors)} times: at {', at '.join(speeds)}"
        said.append(f"range: {reason}{times}")
    if prediction.measured:
        step = prediction.measured
        took = f"{pluralize(step.samples, sample)} took {1e3 * step.seconds:.4g} ms on one GPU"
        said.append(f"measured: {took}, so kernels run at {speed_name(prediction, 0)}")
    said.append("linear: the null model, n GPUs are n times as fast as one")
    remedies = ["accumulate (lesson 05)", "use stages (lessons 03 and 06)"]
    if prediction.precision == "fp32":
        remedies.insert(1, "use 16 bit (lesson 11)")
    too_large = [row for row in prediction.rows if row.memory > gpu.memory]
    if too_large:
        needs = ", ".join(
            f"{pluralize(row.per_gpu, sample)} need {row.memory / GIB:,.0f} GiB"
            for row in too_large
        )
        said.append(
            f"memory: {needs}, {gpu.name} has {gpu.memory / GIB:,.0f}: the times are those of "
            f"GPUs with enough memory; {', or '.join(remedies)}"
        )
    return [textwrap.fill(text, 95, subsequent_indent="  ") for text in said]


def speed_name(prediction: Prediction, number: int) -> str:
    """At which speed of the GPU this estimate of a row was made, by its factor.

    A GPU with published efficiencies has their speed, another one has its data sheet's.
    """
    whole = "published" if prediction.gpu.shares else "data sheet's"
    factor = prediction.factors[number]
    return f"the {whole} speed" if factor == 1 else f"{1 / factor:.3g} × the {whole} speed"


def bend(prediction: Prediction, speed: int = 0) -> str:
    """Where the efficiency falls below WORTH, and the cause that takes most of the time."""
    before = None
    for row in prediction.rows:
        estimate = row.estimates[speed]
        if estimate.efficiency < WORTH:
            lost = sum(estimate.losses.values())
            cause = max(estimate.losses, key=estimate.losses.get)
            share = estimate.losses[cause] / lost
            gpus = f"{row.gpus:,} GPUs" if row.gpus > 1 else "1 GPU"
            where = f"between {before:,} and {gpus}" if before else f"at {gpus}"
            return (
                f"bends {where}. {_reach(row, speed)} "
                f"The largest part of the loss, {share:.0%}: {cause}"
            )
        before = row.gpus
    last = prediction.rows[-1]
    gpus = f"{last.gpus:,} GPUs" if last.gpus > 1 else "1 GPU"
    return f"does not bend up to {gpus}. {_reach(last, speed)} A curve bends below {WORTH:.0%}"


def _reach(row: Row, speed: int) -> str:
    """A sentence: what the efficiency of this number of GPUs is a share of."""
    estimate = row.estimates[speed]
    reference = "one GPU"
    if estimate.losses.get(INPUT):
        reference += " that never waits for data"
    if row.gpus == 1:
        return f"1 GPU reaches {estimate.efficiency:.0%} of the speed of {reference}."
    linear = f"{row.gpus:,} times the speed of {reference}"
    return f"Together, {row.gpus:,} GPUs reach {estimate.efficiency:.0%} of {linear}."


def as_json(prediction: Prediction) -> dict[str, Any]:
    """The prediction as numbers: seconds, samples per second, bytes, fractions."""
    network = prediction.network
    rows = []
    for row in prediction.rows:
        estimates = [
            {
                "kernel_time_factor": factor,
                "seconds": estimate.seconds,
                "samples_per_s": estimate.samples_per_s,
                "speed_up": estimate.speed_up,
                "efficiency": estimate.efficiency,
                "losses_s": estimate.losses,
            }
            for factor, estimate in zip(prediction.factors, row.estimates, strict=True)
        ]
        rows.append(
            {
                "gpus": row.gpus,
                "per_gpu": row.per_gpu,
                "linear_samples_per_s": row.linear,
                "memory_bytes": row.memory,
                "fits": row.memory <= prediction.gpu.memory,
                "estimates": estimates,
            }
        )
    return {
        "model": prediction.workload.name,
        "sample": prediction.workload.sample,
        "gpu": prediction.gpu.name,
        "network": network.label(),
        "gpus_per_node": network.gpus_per_node,
        "precision": prediction.precision,
        "scaling": "strong" if prediction.strong else "weak",
        "spread": prediction.spread,
        "gradient_bytes": prediction.gradients,
        "bends": [bend(prediction, number) for number in range(len(prediction.factors))],
        "rows": rows,
    }


def _range(estimates: tuple[Estimate, ...], show: Callable[[Estimate], str]) -> str:
    """The value of each estimate, once if they look the same."""
    return " … ".join(dict.fromkeys(map(show, estimates)))


def _digits(number: float) -> str:
    """Three digits, or all digits before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"
