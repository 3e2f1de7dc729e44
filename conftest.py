"""For all tests and notebooks: `torchrun` and `multigpu` are those of this environment, also where it is not activated."""

import os
import sys
from pathlib import Path

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
