"""What a device's memory is used for: weights, gradients, activations and the rest."""

import torch

from multigpu import nested
from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.sim.machine import Machine

CATEGORIES = ("weights", "gradients", "optimizer", "workspaces", "activations")


def memory_held(
    machine: Machine, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[torch.device, dict[str, int]]:
    """{device: {category: bytes}}; a device's numbers add up to its memory_allocated.

    A storage counts once, in the first category that it belongs to, so tied weights count
    once. Activations are all memory that is in none of the other categories.
    """
    usage = {meter.device: dict.fromkeys(CATEGORIES, 0) for meter in machine.meters}
    counted_blocks: set[int] = set()
    tensors = {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "optimizer": nested.tensors(optimizer.state) if optimizer else (),
    }
    for category, members in tensors.items():
        for tensor in members:
            if type(tensor) is VirtualTensor and id(tensor._block) not in counted_blocks:
                counted_blocks.add(id(tensor._block))
                usage[tensor.device][category] += tensor._block.allocation.nbytes
    for meter in machine.meters:
        usage[meter.device]["workspaces"] = sum(
            block.allocation.nbytes for block in meter.workspaces.values()
        )
        counted = sum(usage[meter.device].values())
        usage[meter.device]["activations"] = meter.allocated - counted
    return usage
