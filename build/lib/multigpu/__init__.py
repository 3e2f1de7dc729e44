"""The library of the course on training with many GPUs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.vgpu.choice import gpus as gpus
    from multigpu.virtual.cells import virtual_cuda as virtual_cuda

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # These need torch, whose import takes a second: import them only when they are used.
    if name == "gpus":
        from multigpu.vgpu.choice import gpus

        return gpus
    if name == "virtual_cuda":
        from multigpu.virtual.cells import virtual_cuda

        return virtual_cuda
    raise AttributeError(f"module 'multigpu' has no attribute {name!r}")
