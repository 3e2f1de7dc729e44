"""torch.Generator(device="vgpu:1"): a generator of the CPU that reports the virtual GPU as its device."""

import weakref

import torch

from multigpu.vgpu.sim.machine import current

_made: weakref.WeakValueDictionary[int, "VirtualGenerator"] = weakref.WeakValueDictionary()


class VirtualGenerator(torch.Generator):
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
