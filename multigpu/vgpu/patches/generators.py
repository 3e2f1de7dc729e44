"""What is torch.Generator(device="vgpu:1")? The host's generator, with the device's name: its numbers are the CPU's.

Torch asks a device type for its generators in C++ only, so while virtual GPUs run the name torch.Generator is lent.
"""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.ops.generator import VirtualGenerator

_theirs = torch.Generator


class _Either(type(_theirs)):
    """Calling torch.Generator gives one of the two kinds; isinstance and issubclass know both."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Generator:
        if cls is not Generator:
            return super().__call__(*args, **kwargs)
        device = torch.device(kwargs.get("device", args[0] if args else "cpu"))
        return VirtualGenerator(device) if device.type == "vgpu" else _theirs(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, _theirs)
            if cls is Generator
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, other: type) -> bool:
        return (
            issubclass(other, _theirs)
            if cls is Generator
            else super().__subclasscheck__(other)
        )


class Generator(_theirs, metaclass=_Either):
    """torch.Generator while virtual GPUs run."""


def install() -> Callable[[], None]:
    """Lend the name; calling what is returned gives it back."""
    torch.Generator = Generator
    return lambda: setattr(torch, "Generator", _theirs)
