"""Who holds a device's memory? Weights, gradients and optimizer state are known by name; the rest are activations."""

from collections.abc import Iterator

import torch

from multigpu.vgpu.ops.tensor import VirtualTensor
from multigpu.vgpu.sim.machine import Machine

CATEGORIES = ("weights", "gradients", "optimizer", "activations")


def memory_held(
    machine: Machine, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[torch.device, dict[str, int]]:
    """{device: {category: bytes}}; the four numbers of a device add up to its memory_allocated.

    A storage counts once, in the first category that it belongs to: tied weights are held once.
    """
    held = {meter.device: dict.fromkeys(CATEGORIES, 0) for meter in machine.meters}
    seen: set[int] = set()
    tensors = {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer": _inside(list(optimizer.state.values())) if optimizer else (),
    }
    for category, members in tensors.items():
        for tensor in members:
            if type(tensor) is VirtualTensor and id(tensor._block) not in seen:
                seen.add(id(tensor._block))
                held[tensor.device][category] += tensor._block.held.nbytes
    for meter in machine.meters:
        held[meter.device]["activations"] = meter.allocated - sum(held[meter.device].values())
    return held


def _inside(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts and lists: an optimizer's state may have both."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _inside(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _inside(part)
