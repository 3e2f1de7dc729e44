"""What if an operation changes a tensor's shape or storage in place? The wrapper and the meter follow, or all stays as it was.

These are resize_, set_, t_ and the like, and each operation with an `out`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from multigpu.vgpu.ops.tensor import VirtualTensor, identity, wrap
from multigpu.vgpu.sim.memory import Block

Tensor = torch.Tensor


def own_payloads(values: Iterable) -> None:
    """Before a payload changes its shape in place: another tensor, a detached one, may have the same payload."""
    for value in values:
        if type(value) is VirtualTensor:
            value._payload = value._payload.detach()
        elif isinstance(value, (list, tuple)):
            own_payloads(value)


def kept(payload: Tensor, written: bool) -> Callable[[], Any]:
    """How to make a payload again what it is now: its shape, its storage's size, and its numbers if it is an `out`."""
    if payload.layout is not torch.strided:
        return lambda: None
    storage, nbytes = payload.untyped_storage(), payload.untyped_storage().nbytes()
    place = (storage, payload.storage_offset(), payload.shape, payload.stride())
    numbers = payload.clone() if written else None

    def back() -> None:
        storage.resize_(nbytes)
        payload.set_(*place)
        if written:
            payload.copy_(numbers)

    return back


def _block_of(payload: Tensor, key: int, nbytes: int, found: list[VirtualTensor]) -> Block:
    """The block of a storage that a tensor has been set on: another tensor's, one from a file, or a new one."""
    for other in found:
        if other._block.key == key:
            return other._block
    storage = payload.untyped_storage()
    if (block := getattr(storage, "block", None)) is None:
        block = storage.block = Block(
            found[0]._block.meter, key, nbytes
        )  # loading.py: tensors of a file may share it
    return block


def refresh(tensor: VirtualTensor, found: list[VirtualTensor]) -> None:
    """The payload's shape or storage has changed in place: the wrapper and the meter follow."""
    payload, block = tensor._payload, tensor._block
    key, nbytes = identity(payload)
    if key == block.key:
        block.resize(nbytes)
    else:
        block = tensor._block = _block_of(payload, key, nbytes, found)
    if (
        tensor.shape != payload.shape
        or tensor.stride() != payload.stride()
        or tensor.storage_offset() != payload.storage_offset()
    ):
        with torch.no_grad():
            Tensor.data.__set__(tensor, wrap(payload, block))
