"""Draws where-the-time-goes.png, the picture on this page, from what the notebook measured.

python lessons/01-one-gpu/picture.py
"""

import re
from pathlib import Path

import nbformat

from multigpu import plots
from multigpu.course import find_root
from multigpu.notebooks import cells

notebook = nbformat.read(find_root() / "notebooks" / "PT_CNN_SingleGPU.ipynb", as_version=4)
(line,) = re.findall(r"^batch 64, ms per step: (.*)", cells.printed(notebook), re.MULTILINE)
one_gpu = {part: float(number) for part, number in re.findall(r"(\w+) ([\d.]+)", line)}
halved = {part: one_gpu[part] / 2 for part in ("forward", "backward")}
bars = {"one GPU": one_gpu, "two GPUs, at best": one_gpu | halved}

unit = "ms per step of 64 images; the first bar is measured, on one CPU core"
computing = (one_gpu["forward"] + one_gpu["backward"]) / sum(one_gpu.values())
title = f"A second GPU shares forward and backward: {computing:.0%} of this step"
figure = plots.stacked_bars(bars, unit, title)
print(plots.save(figure, Path(__file__).with_name("where-the-time-goes.png")).name)
