"""Run the model parallel tutorial, unchanged, and print the times that it only draws.

python times.py SCRIPT
"""

import json
import os
import runpy
import sys

path = sys.argv[1]
os.chdir(os.path.dirname(os.path.abspath(path)))
names = runpy.run_path(path, run_name="__main__")
times = {
    "model_parallel": names["mp_mean"],
    "one_gpu": names["rn_mean"],
    "pipeline": names["pp_mean"],
    "by_split": dict(zip(map(str, names["split_sizes"]), names["means"], strict=True)),
}
print("times:", json.dumps(times))
