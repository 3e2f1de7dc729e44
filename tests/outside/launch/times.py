"""Run the model parallel tutorial, unchanged, and print the times that it only draws.

python times.py SLOWER SCRIPT      SLOWER divides the GPU's peaks and its memory's bandwidth
"""

import json
import os
import runpy
import sys
from dataclasses import replace

import torch  # noqa: F401  the virtual GPUs start with it

from multigpu.virtual.sim.machine import current

slower = float(sys.argv[1])
path = sys.argv[2]
(costs,) = current().costs.values()
costs.gpu = replace(
    costs.gpu,
    bandwidth=costs.gpu.bandwidth / slower,
    fp64=costs.gpu.fp64 / slower,
    fp32=costs.gpu.fp32 / slower,
    tf32=costs.gpu.tf32 / slower,
    fp16=costs.gpu.fp16 / slower,
)
os.chdir(os.path.dirname(os.path.abspath(path)))
names = runpy.run_path(path, run_name="__main__")
times = {
    "model_parallel": names["mp_mean"],
    "one_gpu": names["rn_mean"],
    "pipeline": names["pp_mean"],
    "by_split": dict(zip(map(str, names["split_sizes"]), names["means"], strict=True)),
}
print("times:", json.dumps(times))
