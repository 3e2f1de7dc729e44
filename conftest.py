"""For all tests and notebooks: `torchrun` and `multigpu` are those of this environment, also where it is not activated.

They run on CPU processes, also on a machine with GPUs: they start two to four ranks, and a machine may have one GPU.
"""

import os
import sys
from pathlib import Path

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["CUDA_VISIBLE_DEVICES"] = ""
