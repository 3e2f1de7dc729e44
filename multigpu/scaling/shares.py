"""The speeds of a GPU for which a prediction is made.

A data sheet has a GPU's peaks and bandwidth. Real kernels reach a share of them. For a GPU
without published shares (`Gpu.shares`), a prediction is made twice: with the data sheet's
figures, and with the lowest share of them.
benchmarks/scaling.py compares published times of one GPU with the simulation: they reach
between 72% and 144% of its speed (more than 100% where cuDNN's Winograd convolutions need
fewer multiplications than the formula counts). The lowest share here leaves room for worse.
"""

from multigpu.virtual.sim.presets import Gpu

LOWEST_SHARE = 0.5


def slowdowns(gpu: Gpu) -> tuple[float, ...]:
    """The factors of the times of the GPU's kernels; 1 is the data sheet's speed.

    A GPU with published shares has one speed, its own.
    """
    if gpu.shares:
        return (1.0,)
    return (1.0, 1 / LOWEST_SHARE)
