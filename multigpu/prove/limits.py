"""How many steps of a comparison prove anything: those of which rounding explains little."""

import numpy as np

from multigpu.prove.compare import Comparison, StepDistances

# A step whose limit is a larger share of the gradients or weights than this proves nothing.
TOO_WIDE = 0.5
# A step's limit is wide if it is larger than WIDE, and than GROWN times the first step's.
WIDE = 0.02
GROWN = 3


def narrow(comparison: Comparison) -> list[StepDistances]:
    """The steps before the first one of which rounding explains too much."""
    narrow = []
    for step in comparison.steps:
        if any(distances.relative()[1] > TOO_WIDE for distances in step.kinds.values()):
            break
        narrow.append(step)
    return narrow


def sharp(comparison: Comparison) -> list[StepDistances]:
    """The steps before the first one whose limit is wide, and has grown to be so."""
    first: dict[int, float] = {}
    sharp = []
    for step in comparison.steps:
        limit = max(distances.relative()[1] for distances in step.kinds.values())
        if limit > max(WIDE, GROWN * first.setdefault(step.key[0], limit)):
            break
        sharp.append(step)
    return sharp


def largest(steps: list[StepDistances]) -> tuple[float, float]:
    """The largest relative difference of weights or gradients in all steps, and its limit."""
    differences = [distances.relative() for step in steps for distances in step.kinds.values()]
    return max(differences, key=lambda pair: (np.isnan(pair[0]), pair[0]))
