"""What is computed with compute=False? Shapes, and small tensors of whole numbers, which programs read: counters, indices."""

from typing import Any

import torch

from multigpu.vgpu.memory import Meter
from multigpu.vgpu.plans import Plan
from multigpu.vgpu.tensor import VirtualTensor

Tensor = torch.Tensor
SMALL = 4096  # elements; see shapes_only


def shapes_only(plan: Plan, flat: list, named: dict, found: list[VirtualTensor]) -> tuple[list, dict]:
    """Without computing, payloads are shapes (meta); small tensors of whole numbers keep their numbers (SMALL).

    Where the two meet, the numbers are given up.
    """
    if not any(tensor._payload.is_meta for tensor in found):
        return flat, named
    for tensor in found:
        if plan.mutable and not tensor._payload.is_meta:
            tensor._payload = tensor._payload.to("meta")  # what is written into it has no numbers
    return [_to_meta(value) for value in flat], {key: _to_meta(value) for key, value in named.items()}


def _to_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_to_meta(part) for part in value])
    return value.to("meta") if isinstance(value, Tensor) and value.dim() > 0 else value


def payload_device(meter: Meter, dtype: torch.dtype, count: int) -> torch.device:
    """Where the payload of a new tensor with `count` elements lives: on the host, or nowhere (meta)."""
    if not meter.machine.compute and count <= SMALL and not (dtype.is_floating_point or dtype.is_complex):
        return torch.device("cpu")
    return meter.machine.payload
