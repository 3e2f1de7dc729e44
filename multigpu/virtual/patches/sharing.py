"""Tensors that go to another process, as arguments or through a queue: they share memory.

On a GPU the other process gets the same memory (CUDA IPC): what one process writes, the others
read, as Hogwild training needs. Here the payload's storage moves into the host's shared memory
and the other process makes a tensor of its own virtual GPU that uses it. As on a GPU, only the
process that has made the memory counts it.
"""

from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_storage_fd

from multigpu.virtual.ops.tensor import (
    VirtualTensor,
    reduce_without_storage,
    refresh_payload,
    wrap,
)
from multigpu.virtual.sim.memory import Block


def register_reduction() -> Callable[[], None]:
    """Register how a tensor is sent to another process."""
    ForkingPickler.register(VirtualTensor, _reduce)
    return lambda: ForkingPickler._extra_reducers.pop(VirtualTensor, None)


class SharedStorage:
    """A payload's storage, which goes once to a process, also if several tensors use it."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage

    def __reduce__(self) -> tuple:
        # The storage keeps its data open, until no tensor uses it.
        file, nbytes = torch.UntypedStorage._share_fd_cpu_(self.storage)
        return _receive, (DupFd(file), nbytes)


def _receive(file: Any, nbytes: int) -> SharedStorage:
    """In the other process: the storage, which is the same one if it was sent before."""
    storage = rebuild_storage_fd(torch.UntypedStorage, file, nbytes)
    return _shared(storage)


def _shared(storage: torch.UntypedStorage) -> SharedStorage:
    """The SharedStorage of a storage; torch has one Python object for each storage."""
    if not hasattr(storage, "shared"):
        storage.shared = SharedStorage(storage)
    return storage.shared


def _reduce(tensor: VirtualTensor) -> tuple:
    """Return (function, its arguments), with which the other process makes the tensor.

    A tensor without numbers, or of a layout without a storage, is copied. Raises RuntimeError
    for a tensor in the middle of a graph, as torch does.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "A tensor that requires grad and is not a leaf cannot go to another process, "
            "because autograd stays in one process: send tensor.detach()."
        )
    refresh_payload(tensor)
    payload = tensor._payload
    meter = tensor._block.meter
    can_share = (
        payload.layout is torch.strided
        and not payload.is_meta
        and meter.alive
        and payload.untyped_storage().nbytes()
        and not payload.is_conj()
        and not payload.is_neg()
    )
    if not can_share:
        return reduce_without_storage(tensor)
    meter.machine.clock.wait_for_collectives([tensor])
    storage = _shared(payload.untyped_storage())
    geometry = (payload.storage_offset(), payload.shape, payload.stride())
    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    place = (str(tensor.device), tensor.dtype)
    return _rebuild, (storage, geometry, place, kind, tensor.requires_grad)


def _rebuild(
    shared: SharedStorage,
    geometry: tuple,
    place: tuple[str, torch.dtype],
    kind: type,
    requires_grad: bool,
) -> torch.Tensor:
    """In the other process: a tensor on its virtual GPU that uses the shared storage."""
    device, dtype = place
    storage = shared.storage
    meter = torch.empty(0, device=device)._block.meter
    block = getattr(storage, "shared_block", None)
    if block is None or block.meter is not meter:
        block = storage.shared_block = Block(meter, storage._cdata, 0)
        # Below the addresses of all devices.
        block._address = storage.data_ptr()
    tensor = wrap(torch.empty(0, dtype=dtype).set_(storage, *geometry), block)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
