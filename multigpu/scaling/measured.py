"""A measured step of one GPU: how fast its kernels are, compared with the simulation."""

import math
from dataclasses import dataclass

from multigpu.errors import UserError
from multigpu.scaling.layers import profile_any
from multigpu.scaling.workloads import Workload
from multigpu.virtual.sim.presets import Gpu

# Kernels from 8 times as fast as simulated to 8 times as slow.
FACTORS = tuple(2 ** (n / 16) for n in range(-48, 49))


@dataclass(frozen=True)
class Measured:
    """A step of `samples` samples on one GPU, without DDP, took `seconds`."""

    seconds: float
    samples: int


def kernel_factor(
    measured: Measured, workload: Workload, gpu: Gpu, precision: str = "fp32"
) -> float:
    """The factor of the kernels' times with which the simulated step takes as long.

    Launches by the host take as long as before. Raises UserError if no factor in FACTORS
    gives the measured time.
    """
    seconds, samples = measured.seconds, measured.samples
    if samples < 1 or not 0 < seconds < math.inf:
        raise UserError(
            f"a measured step of {1e3 * seconds:g} ms with {samples} samples is not possible: "
            f"give a time greater than 0, and at least one sample."
        )
    (steps,) = profile_any(workload, gpu, [samples], precision, FACTORS).values()
    step_times = [step.alone for step in steps]
    if not step_times[0] <= seconds <= step_times[-1]:
        simulated = step_times[FACTORS.index(1.0)]
        raise UserError(
            f"--step-ms is {1e3 * seconds:g}, but a step with {samples} samples of "
            f"{workload.name} on {gpu.name} is simulated to take {1e3 * simulated:.3g} ms, "
            f"and {1e3 * step_times[0]:.3g} to {1e3 * step_times[-1]:.3g} with kernels 8 "
            f"times as fast or slow: compare the model, the GPU, the precision and "
            f"--step-samples."
        )
    # Between two factors the time is almost a line.
    upper = next(n for n in range(1, len(step_times)) if step_times[n] >= seconds)
    rise = step_times[upper] - step_times[upper - 1]
    part = (seconds - step_times[upper - 1]) / rise if rise else 1.0
    return FACTORS[upper - 1] + part * (FACTORS[upper] - FACTORS[upper - 1])
