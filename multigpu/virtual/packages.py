"""Packages that a run on virtual GPUs does not import as they are.

The import of those whose kernels run on real GPUs only raises one sentence. Triton, if it is
installed, raises it when a kernel is launched: a program can import it and launch none of its
kernels, as torchtitan does without expert parallelism. NVML's package (pynvml, which
nvidia-ml-py installs) is a stand-in, which knows the virtual GPUs.

Python imports this module at its start, in every process of a run: it imports little.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import NoReturn

# The package → what a program can use instead.
PACKAGES = {
    "triton": "PyTorch's own operations",
    "apex": "torch.amp, torch.optim and torch.nn.parallel.DistributedDataParallel",
    "flash_attn": "torch.nn.functional.scaled_dot_product_attention",
    "flash_attn_interface": "torch.nn.functional.scaled_dot_product_attention",
    "xformers": "torch.nn.functional.scaled_dot_product_attention",
    "bitsandbytes": "torch.optim's optimizers, and weights in bfloat16",
    "transformer_engine": "torch.nn's modules with torch.autocast",
    "cupy": "torch's tensors",
    "pycuda": "torch's operations",
    "mamba_ssm": "a version of the model in PyTorch's own operations",
    "causal_conv1d": "torch.nn.Conv1d",
}


class Finder:
    """Finds the packages that cannot run before Python does, while `holds()` is True.

    An installed Triton is found, but launches no kernel; with `refuses_triton` it is refused.
    """

    def __init__(self, holds: Callable[[], bool] = lambda: True):
        self.holds = holds
        self.refuses_triton = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pynvml" and self.holds():
            return ModuleSpec(name, _Nvml())
        if name not in PACKAGES or not self.holds():
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and name == "triton" and not self.refuses_triton:
            return _without_launches(spec)
        if spec is not None:
            return ModuleSpec(name, _Refusing())
        # Not installed. An import gets the sentence, but importlib.util.find_spec, with which
        # programs ask whether a package is there, gets None: it calls from another function.
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(_sentence(name), name=name)
        return None


class _Nvml:
    """Loads the stand-in of pynvml."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from multigpu.virtual import nvml

        # Not what nvml.py imports: programs write `from pynvml import *`.
        own = {name: value for name, value in vars(nvml).items() if name[:4].lower() == "nvml"}
        module.__dict__.update(own, __getattr__=nvml.__getattr__)


class _Refusing:
    """Loads nothing: an import of an installed package raises ImportError."""

    def create_module(self, spec: ModuleSpec) -> NoReturn:
        raise ImportError(_sentence(spec.name), name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _without_launches(spec: ModuleSpec) -> ModuleSpec:
    """The spec of Triton, after whose import a launch of a kernel raises RuntimeError."""
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        module.runtime.jit.KernelInterface.__getitem__ = refuse

    def refuse(kernel: object, grid: object) -> NoReturn:
        raise RuntimeError(_sentence("triton"))

    spec.loader.exec_module = exec_module
    return spec


def _sentence(package: str) -> str:
    return (
        f"{package} does not run on virtual GPUs, because its kernels are compiled for real "
        f"ones: use {PACKAGES[package]} instead, or run this program on a machine with a GPU."
    )
