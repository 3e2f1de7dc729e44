"""The shape-only mode (compute=False): payloads are on the device "meta", so they have shapes
but no numbers. Small tensors that programs read keep numbers: counters, indices and scalars.

If an operation writes a shape into a tensor with numbers, this tensor and all tensors that
share its storage lose their numbers.
"""

from typing import Any

import torch

from multigpu.virtual.ops.op_info import OpInfo
from multigpu.virtual.ops.tensor import VirtualTensor, refresh_payload
from multigpu.virtual.sim.memory import Meter

Tensor = torch.Tensor
# Integer and bool tensors of at most this many elements keep their numbers. Other tensors keep
# them only if they have at most one element.
SMALL = 4096
# GradScaler's search for infinite gradients writes its result into a flag. Shapes have no
# infinite elements, so the flag keeps its number.
FIND_INFINITE = "_amp_foreach_non_finite_check_and_unscale_"


def shapes_only(
    info: OpInfo, payloads: list, kwargs: dict, tensors: list[VirtualTensor]
) -> tuple[list, dict]:
    """The arguments for a kernel: if one tensor is a shape, all with dimensions become shapes.

    The tensors that the operation writes then lose their numbers.
    """
    before = [tensor._payload for tensor in tensors]
    for tensor in tensors:
        refresh_payload(tensor)
    if not any(tensor._payload.is_meta for tensor in tensors):
        return payloads, kwargs
    if info.mutable:
        written = info.written_ids(payloads, kwargs)
        for tensor, payload in zip(tensors, before, strict=True):
            is_flag = info.name == FIND_INFINITE and payload.dim() == 0
            if id(payload) in written and not is_flag:
                drop_numbers(tensor)
    now = {
        id(payload): tensor._payload for payload, tensor in zip(before, tensors, strict=True)
    }
    meta_args = [_to_meta(value, now) for value in payloads]
    meta_kwargs = {name: _to_meta(value, now) for name, value in kwargs.items()}
    return meta_args, meta_kwargs


def _to_meta(value: Any, now: dict[int, Tensor]) -> Any:
    """An argument as a shape; a tensor without dimensions keeps its number.

    `now` maps the id of a tensor's previous payload to its current payload.
    """
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_to_meta(part, now) for part in value])
    if not isinstance(value, Tensor):
        return value
    value = now.get(id(value), value)
    return value.to("meta") if value.dim() > 0 and not value.is_meta else value


def drop_numbers(tensor: VirtualTensor) -> None:
    """Drop a tensor's numbers. Tensors that share its storage lose theirs when next used."""
    if not tensor._payload.is_meta:
        storage = tensor._payload.untyped_storage()
        shape = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        storage.meta_storage = shape.untyped_storage()
        refresh_payload(tensor)
        tensor._block.key = storage.meta_storage._cdata


def payload_device(meter: Meter, dtype: torch.dtype, count: int) -> torch.device:
    """The device of the payload of a new tensor with `count` elements: "cpu" or "meta"."""
    most = 1 if dtype.is_floating_point or dtype.is_complex else SMALL
    return torch.device("cpu") if count <= most else meter.machine.payload_device
