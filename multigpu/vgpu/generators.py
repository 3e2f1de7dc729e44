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

    def clone_state(self) -> "VirtualGenerator":
        return _again(self.place, self.get_state())

    def __reduce__(self) -> tuple:
        return _again, (self.place, self.get_state())


def _again(place: torch.device, state: torch.Tensor) -> VirtualGenerator:
    made = VirtualGenerator(place)
    made.set_state(state)
    return made


def place_of(generator: torch.Generator) -> torch.device:
    """Its device, also of one that torch has wrapped anew on the way to a kernel."""
    return _made.get(generator._cdata, generator).device


class _Either(type(_theirs)):
    """Calling torch.Generator gives one of the two kinds; isinstance and issubclass know both."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Generator:
        if cls is not Generator:
            return super().__call__(*args, **kwargs)
        device = torch.device(kwargs.get("device", args[0] if args else "cpu"))
        return VirtualGenerator(device) if device.type == "vgpu" else _theirs(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _theirs) if cls is Generator else super().__instancecheck__(instance)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, _theirs) if cls is Generator else super().__subclasscheck__(other)


class Generator(_theirs, metaclass=_Either):
    """torch.Generator while virtual GPUs run."""


def install() -> Callable[[], None]:
    """Lend the name; calling what is returned gives it back."""
    torch.Generator = Generator
    return lambda: setattr(torch, "Generator", _theirs)
