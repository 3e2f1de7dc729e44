"""Makes torch.Generator(device="vgpu:1") return a VirtualGenerator."""

from typing import Any

import torch

from multigpu.vgpu.ops.generator import VirtualGenerator


def generator_class(original: type[torch.Generator]) -> type[torch.Generator]:
    """A class that replaces torch.Generator: a call makes an original or a VirtualGenerator.

    isinstance and issubclass accept both kinds. The class itself has no instances, so no
    instance outlives vgpu.stop().
    """

    class ByDevice(type(original)):
        def __call__(cls, *args: Any, **kwargs: Any) -> torch.Generator:
            if cls is not Generator:
                return super().__call__(*args, **kwargs)
            device = torch.device(kwargs.get("device", args[0] if args else "cpu"))
            return VirtualGenerator(device) if device.type == "vgpu" else original(device)

        def __instancecheck__(cls, instance: Any) -> bool:
            if cls is not Generator:
                return super().__instancecheck__(instance)
            return isinstance(instance, original)

        def __subclasscheck__(cls, other: type) -> bool:
            if cls is not Generator:
                return super().__subclasscheck__(other)
            return issubclass(other, original)

    class Generator(original, metaclass=ByDevice):
        """torch.Generator while virtual GPUs run."""

    return Generator
