"""The library of the course on training with many GPUs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.vgpu.choice import gpus as gpus

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `gpus` needs torch, whose import takes a second: import `gpus` only when it is used.
    if name == "gpus":
        from multigpu.vgpu.choice import gpus

        return gpus
    raise AttributeError(f"module 'multigpu' has no attribute {name!r}")
