"""Makes torch.Generator(device="vgpu:1") return a VirtualGenerator."""

import torch

from multigpu.virtual.ops.generator import VirtualGenerator
from multigpu.virtual.patches.by_device import class_by_device
from multigpu.virtual.sim import names

Device = torch.device | str | int


def generator_class(original: type[torch.Generator]) -> type[torch.Generator]:
    """A class that replaces torch.Generator: a call can make a VirtualGenerator."""

    def is_virtual(device: Device = "cpu") -> bool:
        return names.is_virtual(torch.device(device))

    def make(device: Device) -> VirtualGenerator:
        return VirtualGenerator(torch.device(device))

    return class_by_device(original, is_virtual, make)
