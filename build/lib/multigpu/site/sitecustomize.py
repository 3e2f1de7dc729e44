"""Python imports this at its start, in every process of `multigpu virtual` and `prove`.

The commands put this folder on PYTHONPATH, so that also the processes that a program starts
come here: torchrun's workers, the children of mp.spawn, DataLoader's workers.
"""

import os
import sys


def _watch_torch():
    """Import multigpu now, from where the command has it, and wait for `import torch`.

    A program's folder can have a multigpu.py. It is not on the path yet.
    """
    root = os.path.dirname(os.path.dirname(_folder))
    sys.path.insert(0, root)
    try:
        if os.environ.get("MULTIGPU_VIRTUAL"):
            from multigpu.virtual import imports

            imports.watch()
        if os.environ.get("MULTIGPU_PROVE"):
            from multigpu.prove import inside

            inside.watch()
    finally:
        sys.path.remove(root)


def _run_hidden():
    """Run the environment's own sitecustomize, which this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != _folder]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


_folder = os.path.dirname(os.path.realpath(__file__))
if os.environ.get("MULTIGPU_VIRTUAL") or os.environ.get("MULTIGPU_PROVE"):
    _watch_torch()
_run_hidden()
