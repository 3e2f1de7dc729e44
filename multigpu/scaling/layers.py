"""A model of many equal layers, from models of one and of two layers.

Each layer more adds the same time to forward, backward and the optimizer's step, and the same
gradients. So a transformer of 96 layers is known after two short runs. That is exact if the
GPU is the slower one for the whole step, or the host with its launches. Where one of them
falls behind in the middle of the step, as in a tiny model, it is an approximation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from multigpu.scaling.compute import Compute, Gradient, profile
from multigpu.scaling.workloads import Workload
from multigpu.virtual.sim.presets import Gpu

# A model with this number of layers runs whole.
FEW = 6


def profile_any(
    workload: Workload,
    gpu: Gpu,
    batches: Iterable[int],
    precision: str = "fp32",
    slowdowns: Sequence[float] = (1.0,),
) -> dict[int, list[Compute]]:
    """As `profile`, in a time that does not grow with the number of equal layers."""
    batches = list(batches)
    if workload.layers <= FEW:
        return profile(workload, gpu, batches, precision, slowdowns)
    one = profile(workload, gpu, batches, precision, slowdowns, layers=1)
    two = profile(workload, gpu, batches, precision, slowdowns, layers=2)
    return {
        samples: [
            extrapolate(*pair, workload.layers)
            for pair in zip(one[samples], two[samples], strict=True)
        ]
        for samples in batches
    }


def extrapolate(one: Compute, two: Compute, layers: int) -> Compute:
    """The step of a model with `layers` layers, from those with one and with two.

    Backward meets the last layer first. The first layer of two is repeated.
    """
    more = layers - 2
    seconds = two.backward - one.backward
    first = [n for n, gradient in enumerate(two.gradients) if _layer(gradient) == 0]
    start, end = first[0], first[-1] + 1
    gradients = [
        _numbered(gradient, layers - 1) if _layer(gradient) == 1 else gradient
        for gradient in two.gradients[:start]
    ]
    for count in range(more + 1):
        for gradient in two.gradients[start:end]:
            moved = replace(gradient, ready=gradient.ready + count * seconds)
            gradients.append(_numbered(moved, more - count))
    gradients += [
        replace(gradient, ready=gradient.ready + more * seconds)
        for gradient in two.gradients[end:]
    ]

    def line(field: str) -> float:
        return getattr(two, field) + more * (getattr(two, field) - getattr(one, field))

    return Compute(
        two.samples,
        forward=line("forward"),
        backward=line("backward"),
        update=line("update"),
        copies_in=line("copies_in"),
        gradients=tuple(gradients),
        memory=int(line("memory")),
    )


def _layer(gradient: Gradient) -> int | None:
    """The number of the gradient's layer; None outside the equal layers."""
    parts = gradient.name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def _numbered(gradient: Gradient, layer: int) -> Gradient:
    """The gradient of the same parameter in another layer."""
    parts = gradient.name.split(".")
    return replace(gradient, name=".".join(["blocks", str(layer), *parts[2:]]))
