"""What each Python process of a run does at its start, before the script.

OUTSIDE_SEED  seed Python, NumPy and torch with it: for a script that does not seed itself
OUTSIDE_CPU   in the run on the CPU: draw and divide as this many GPUs do (as_gpus.py)
OUTSIDE_VGPU  start this many virtual GPUs by their own name
OUTSIDE_STEPS  in a reference's run: the folder that tells whether its training moves weights
               (moves.py)

The data sets' checksums are not compared, because the data are stand-ins, and tiktoken does
not download GPT-2's encoding. torch._six, which torch 1 had, is there. torchvision's wheel
for CUDA does not load its own operators beside torch's CPU build, and then cannot be imported:
here they are defined without kernels.
"""

import collections.abc
import importlib.util
import os
import sys
import types


def _after_torch(torch):
    six = types.ModuleType("torch._six")
    six.inf = torch.inf
    six.container_abcs = collections.abc
    sys.modules["torch._six"] = six
    if gpus := os.environ.get("OUTSIDE_CPU"):
        import as_gpus

        as_gpus.install(int(gpus))
    if gpus := os.environ.get("OUTSIDE_VGPU"):
        from multigpu.virtual import control

        control.start(int(gpus))
    if folder := os.environ.get("OUTSIDE_STEPS"):
        import moves

        moves.watch(folder)
    if seed := os.environ.get("OUTSIDE_SEED"):
        import random

        random.seed(int(seed))
        torch.manual_seed(int(seed))


def _after_numpy(numpy):
    if seed := os.environ.get("OUTSIDE_SEED"):
        numpy.random.seed(int(seed))


def _after_extension(extension):
    if extension._has_ops():
        return
    import torch

    global _library
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _after_cifar(cifar):
    cifar.check_integrity = lambda *given, **options: True


def _after_tiktoken(tiktoken):
    from tiktoken_bytes import get_encoding

    tiktoken.get_encoding = get_encoding


_AFTER = {
    "torch": _after_torch,
    "numpy": _after_numpy,
    "torchvision.extension": _after_extension,
    "torchvision.datasets.cifar": _after_cifar,
    "tiktoken": _after_tiktoken,
}


class _Finder:
    """Calls a function of _AFTER when its module has been imported."""

    def __init__(self):
        self.wanted = dict(_AFTER)

    def find_spec(self, name, path=None, target=None):
        then = self.wanted.pop(name, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
