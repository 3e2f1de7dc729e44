"""All tests and notebooks use this environment's `torchrun` and `multigpu`, active or not.

They run on CPU processes, also on a machine with GPUs: they start two to four ranks, and a
machine may have only one GPU.
"""

import os
import sys
from pathlib import Path

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["CUDA_VISIBLE_DEVICES"] = ""
