"""Draw bits.png, the picture on this lesson's page.

python lessons/11-precision/picture.py
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multigpu import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def parts_of(dtype: torch.dtype) -> tuple[int, int]:
    """The bits of a type's exponent and of its fraction. The sign has the remaining bit."""
    limits = torch.finfo(dtype)
    fraction = round(-math.log2(limits.eps))
    return limits.bits - 1 - fraction, fraction


def draw_bits() -> "Figure":
    """Draw each type of TYPES as a row of boxes, whose widths are bits."""
    exponent, fraction = parts_of(torch.bfloat16)
    title = f"bfloat16 has {exponent} bits of exponent and {fraction} of fraction, "
    title += "float16 has {} and {}".format(*parts_of(torch.float16))
    axes = plots.schematic([], title, height=2.2)
    for row, dtype in enumerate(TYPES):
        exponent, fraction = parts_of(dtype)
        plots.box(axes, "idle", 0, row, 1, "\u00b1")
        plots.box(axes, "gradients", 1, row, exponent, f"exponent: {exponent}")
        plots.box(axes, "weights", 1 + exponent, row, fraction, f"fraction: {fraction}")
    names = [str(dtype).removeprefix("torch.") for dtype in TYPES]
    axes.set_yticks(range(len(TYPES)), names)
    axes.set_xlim(0, 32.1)
    return axes.figure


if __name__ == "__main__":
    print(plots.save(draw_bits(), Path(__file__).with_name("bits.png")).name)
