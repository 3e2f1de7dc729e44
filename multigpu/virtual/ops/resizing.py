"""Operations that can change a tensor's shape or storage in place: resize_, set_, t_ and
similar ones, and each operation with an `out`. Afterwards the wrapper and the meter match the
payload; if the operation fails, everything is restored.
"""

from collections.abc import Callable, Iterable

import torch

from multigpu.virtual.ops.tensor import VirtualTensor, storage_id, wrap_view
from multigpu.virtual.sim.memory import Block

Tensor = torch.Tensor


def detach_payloads(values: Iterable) -> None:
    """Give each virtual tensor, also inside lists, its own payload object.

    A tensor and its detached tensor share one payload object, but a new shape of one tensor
    must not change the other.
    """
    for value in values:
        if type(value) is VirtualTensor:
            value._payload = value._payload.detach()
        elif isinstance(value, (list, tuple)):
            detach_payloads(value)


def snapshot(payload: Tensor, with_numbers: bool) -> Callable[[], None]:
    """Return a function that restores the present shape and storage size of the payload.

    With `with_numbers` it also restores the elements.
    """
    if payload.layout is not torch.strided:
        return lambda: None
    storage = payload.untyped_storage()
    nbytes = storage.nbytes()
    geometry = (payload.storage_offset(), payload.shape, payload.stride())
    numbers = payload.clone() if with_numbers else None

    def restore() -> None:
        storage.resize_(nbytes)
        payload.set_(storage, *geometry)
        if numbers is not None:
            payload.copy_(numbers)

    return restore


def update_wrapper(tensor: VirtualTensor, tensors: list[VirtualTensor]) -> None:
    """Update the wrapper and the meter after the payload's shape or storage has changed.

    `tensors` are all virtual tensors of the operation. Raises torch.OutOfMemoryError if the
    new storage does not fit.
    """
    payload = tensor._payload
    block = tensor._block
    key, nbytes = storage_id(payload)
    if key == block.key:
        block.resize(nbytes)
    else:
        block = tensor._block = _block_of(payload, key, nbytes, tensors)
    if (
        tensor.shape != payload.shape
        or tensor.stride() != payload.stride()
        or tensor.storage_offset() != payload.storage_offset()
    ):
        with torch.no_grad():
            Tensor.data.__set__(tensor, wrap_view(payload, block))


def _block_of(payload: Tensor, key: int, nbytes: int, tensors: list[VirtualTensor]) -> Block:
    """The block of the payload's new storage: another tensor's block, or a new block.

    The storage keeps a reference to a new block, because several tensors of one file can share
    the storage (loading.py).
    """
    for other in tensors:
        if other._block.key == key:
            return other._block
    storage = payload.untyped_storage()
    block = getattr(storage, "block", None)
    if block is None:
        block = storage.block = Block(tensors[0]._block.meter, key, nbytes)
    return block
