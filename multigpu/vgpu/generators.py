"""What is torch.Generator(device="vgpu:1")? The host's generator, with the device's name: its numbers are the CPU's.

Torch asks a device type for its generators in C++ only, so while virtual GPUs run the name torch.Generator is lent.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from multigpu.vgpu.machine import current

_theirs = torch.Generator
_made: weakref.WeakValueDictionary[int, "VirtualGenerator"] = weakref.WeakValueDictionary()


class VirtualGenerator(_theirs):
    """Random numbers of a virtual GPU, apart from those that the device has by itself."""

    def __new__(cls, device: torch.device) -> "VirtualGenerator":
        return super().__new__(cls, "cpu")

    def __init__(self, device: torch.device):
        self.place = current().meter(device).device
        _made[self._cdata] = self

    @property
    def device(self) -> torch.device:
        return self.place


def place_of(generator: torch.Generator) -> torch.device:
    """Its device, also of one that torch has wrapped anew on the way to a kernel."""
    return _made.get(generator._cdata, generator).device


class _Either(type):
    """Calling torch.Generator gives one of the two kinds; isinstance knows both."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        device = torch.device(device)
        return VirtualGenerator(device) if device.type == "vgpu" else _theirs(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _theirs)


class Generator(metaclass=_Either):
    """torch.Generator while virtual GPUs run."""


def install() -> Callable[[], None]:
    """Lend the name; calling what is returned gives it back."""
    torch.Generator = Generator
    return lambda: setattr(torch, "Generator", _theirs)
