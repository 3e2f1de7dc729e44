"""What is computed with compute=False? Shapes, and small tensors that programs read: counters, indices, single numbers.

Payloads are shapes (meta). Where a shape is written into numbers, these are given up, for all tensors on that storage.
"""

from typing import Any

import torch

from multigpu.vgpu.ops.op_info import Plan
from multigpu.vgpu.ops.tensor import VirtualTensor, follow
from multigpu.vgpu.sim.memory import Meter

Tensor = torch.Tensor
SMALL = 4096  # elements of a tensor of whole numbers that keeps them; others keep one
# It looks for infinite gradients. Shapes have none, so what it found before stays as it is.
SEARCH = "_amp_foreach_non_finite_check_and_unscale_"


def shapes_only(
    plan: Plan, flat: list, named: dict, found: list[VirtualTensor]
) -> tuple[list, dict]:
    """The arguments for a kernel: where shapes and numbers meet, all become shapes, and what is written is given up."""
    before = [tensor._payload for tensor in found]
    for tensor in found:
        follow(tensor)
    if not any(tensor._payload.is_meta for tensor in found):
        return flat, named
    if plan.mutable:
        written = plan.written(flat, named)
        for tensor, payload in zip(found, before, strict=True):
            if id(payload) in written and not (plan.name == SEARCH and payload.dim() == 0):
                forget(tensor)
    now = {id(payload): tensor._payload for payload, tensor in zip(before, found, strict=True)}
    return [_to_meta(value, now) for value in flat], {
        key: _to_meta(value, now) for key, value in named.items()
    }


def _to_meta(value: Any, now: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_to_meta(part, now) for part in value])
    if not isinstance(value, Tensor):
        return value
    value = now.get(id(value), value)
    return value.to("meta") if value.dim() > 0 and not value.is_meta else value


def forget(tensor: VirtualTensor) -> None:
    """Give up a tensor's numbers, and those of all that share its storage: they follow when they are next used."""
    if not tensor._payload.is_meta:
        storage = tensor._payload.untyped_storage()
        storage.shape_of = torch.empty(
            storage.nbytes(), dtype=torch.uint8, device="meta"
        ).untyped_storage()
        follow(tensor)
        tensor._block.key = storage.shape_of._cdata


def payload_device(meter: Meter, dtype: torch.dtype, count: int) -> torch.device:
    """Where the payload of a new tensor with `count` elements lives: on the host, or nowhere (meta)."""
    most = 1 if dtype.is_floating_point or dtype.is_complex else SMALL
    return torch.device("cpu") if count <= most else meter.machine.payload
