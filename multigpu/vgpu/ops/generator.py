"""torch.Generator(device="vgpu:1"): a CPU generator whose `device` is a virtual GPU."""

import weakref

import torch

from multigpu.vgpu.sim.machine import current

# All virtual generators, by the address of the C++ generator. When torch passes a generator to
# a kernel, it makes a new Python object for the generator: only the address stays the same.
_generators: weakref.WeakValueDictionary[int, "VirtualGenerator"] = (
    weakref.WeakValueDictionary()
)


class VirtualGenerator(torch.Generator):
    """A generator for a virtual GPU, separate from the device's default generator."""

    def __new__(cls, device: torch.device) -> "VirtualGenerator":
        return super().__new__(cls, "cpu")

    def __init__(self, device: torch.device):
        self._device = current().meter(device).device
        _generators[self._cdata] = self

    @property
    def device(self) -> torch.device:
        return self._device

    def clone_state(self) -> "VirtualGenerator":
        return _with_state(self._device, self.get_state())

    def __reduce__(self) -> tuple:
        return _with_state, (self._device, self.get_state())


def _with_state(device: torch.device, state: torch.Tensor) -> VirtualGenerator:
    generator = VirtualGenerator(device)
    generator.set_state(state)
    return generator


def device_of(generator: torch.Generator) -> torch.device:
    """The generator's device, even if torch has made a new Python object for the generator."""
    return _generators.get(generator._cdata, generator).device
