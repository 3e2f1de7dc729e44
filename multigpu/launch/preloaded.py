"""The imports of the server in `prefork`, and what each of its forks does anew."""

import gc
import importlib
import os

import numpy as np

# torch._dynamo: DDP and optimizers import it, which takes a second; sklearn: the scripts do.
for name in ("torch._dynamo", "sklearn.datasets", "multigpu.data", "multigpu.models"):
    importlib.import_module(name)
# Without this, all forks would draw the same numbers from NumPy's global generator. Python's
# `random` has the same rule of its own. torch starts with the same seed in each new process.
os.register_at_fork(after_in_child=np.random.seed)
# The forks share the memory of these objects with the server: garbage collection does not
# write to them.
gc.collect()
gc.freeze()
