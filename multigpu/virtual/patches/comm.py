"""DataParallel's copies between virtual GPUs, which replace those of torch.nn.parallel.comm.

torch's functions are written in C++, for CUDA and NCCL. The functions in this file have the
same signatures, but for `out`, and the same results. They replace torch's functions while
virtual GPUs run, but tensors of other devices still go to torch's functions.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.patches.streams import StreamContext
from multigpu.virtual.sim import names
from multigpu.virtual.sim.machine import current
from multigpu.virtual.sim.notes import carrying

Tensor = torch.Tensor
# As in torch: an int is the index of a device, and -1 is the CPU.
Device = int | str | torch.device
# Bytes of a bucket, as in torch.
BUFFER_SIZE = 10485760


def _device(index: Device) -> torch.device:
    if isinstance(index, int):
        device = torch.device("cpu") if index == -1 else torch.device(names.INNER, index)
    else:
        device = torch.device(index)
    return names.show(device)


def _buckets(tensors: Sequence[Tensor], nbytes: int) -> list[list[Tensor]]:
    return list(torch._utils._take_tensors(list(tensors), nbytes))


def _flatten(bucket: Sequence[Tensor]) -> Tensor:
    return torch._utils._flatten_dense_tensors(bucket)


def _unflatten(flat: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Split `flat` into new tensors with the shapes of the bucket's tensors."""
    return [part.clone() for part in torch._utils._unflatten_dense_tensors(flat, bucket)]


def _in_order_of(tensors: Sequence[Tensor], copies: list[Tensor]) -> list[Tensor]:
    """The copies in the order of the tensors.

    Buckets change the order, because each bucket holds tensors of one type.
    """
    return list(torch._utils._reorder_tensors_as(copies, list(tensors)))


def broadcast(tensor: Tensor, devices: Sequence[Device]) -> tuple[Tensor, ...]:
    """Copies of the tensor on the devices; on its own device, the tensor itself."""
    return tuple(tensor.to(_device(device), non_blocking=True) for device in devices)


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[Device], buffer_size: int = BUFFER_SIZE
) -> list[list[Tensor]]:
    """Copy the tensors to each device; return one list of copies per device.

    A bucket of `buffer_size` bytes is sent as one copy, as with NCCL.
    """
    # DataParallel calls this before it starts its threads, one per device.
    clock = current().clock
    clock.num_replica_threads = len(devices)
    sources = [tensor.detach() for tensor in tensors]
    with carrying(clock, "weights"):
        return [_copies(sources, _device(device), buffer_size) for device in devices]


def _copies(sources: list[Tensor], device: torch.device, buffer_size: int) -> list[Tensor]:
    # The first replica shares the module's own tensors.
    if sources and device == sources[0].device:
        return [source.detach() for source in sources]
    copies = []
    for bucket in _buckets(sources, buffer_size):
        flat = _flatten(bucket).to(device, non_blocking=True)
        copies += _unflatten(flat, bucket)
    return _in_order_of(sources, copies)


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]],
    destination: int | None = None,
    buffer_size: int = BUFFER_SIZE,
) -> tuple[Tensor, ...]:
    """Sum inputs[device][i] over the devices; return the sums, on the destination.

    A bucket of `buffer_size` bytes is sent as one copy, and a sparse tensor by itself. The
    default destination is the first device.
    """
    target = _device(inputs[0][0].get_device() if destination is None else destination)
    root = next((i for i, tensors in enumerate(inputs) if tensors[0].device == target), None)
    if root is None:
        raise RuntimeError(
            "reduce_add expects destination to be on the same GPU with one of the tensors"
        )
    root_first = [inputs[root], *(tensors for i, tensors in enumerate(inputs) if i != root)]
    sums = []
    order = []
    dense = []
    for tensors in zip(*root_first, strict=True):
        if all(tensor.is_sparse for tensor in tensors):
            sums.append(_sum(tensors, target))
            order.append(tensors[0])
        else:
            dense.append([t.to_dense() if t.is_sparse else t for t in tensors])
            order.append(dense[-1][0])
    buckets_of = [_buckets(tensors, buffer_size) for tensors in zip(*dense, strict=True)]
    for buckets in zip(*buckets_of, strict=True):
        flat = _sum([_flatten(bucket) for bucket in buckets], target)
        sums += _unflatten(flat, buckets[0])
    return tuple(_in_order_of(order, sums))


def _sum(tensors: Sequence[Tensor], target: torch.device) -> Tensor:
    """The sum of one tensor of each device, of which the first is on the target."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor.to(target, non_blocking=True)
    return total


def scatter(
    tensor: Tensor,
    devices: Sequence[Device],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.Stream | None] | None = None,
) -> tuple[Tensor, ...]:
    """Send a chunk of the tensor to each device: equal chunks, or chunks of the given sizes.

    With `streams`, the copy to a device is on that device's stream. DataParallel passes
    streams for a tensor of the host, and then makes the current streams wait for them.
    """
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    places = streams or repeat(None)
    copies = []
    with carrying(current().clock, "inputs"):
        # A batch smaller than the number of devices has fewer chunks than devices.
        for chunk, device, stream in zip(chunks, devices, places, strict=False):
            with StreamContext(stream):
                copies.append(chunk.to(_device(device), non_blocking=True))
    return tuple(copies)


def gather(
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: Device | None = None,
) -> Tensor:
    """The tensors of several devices, concatenated along `dim` on the destination.

    The default destination is the current device; -1 is the CPU.
    """
    if destination is None:
        target = _device(torch.vgpu.current_device())
    else:
        target = _device(destination)
    non_blocking = target.type != "cpu"
    return torch.cat([tensor.to(target, non_blocking=non_blocking) for tensor in tensors], dim)


# These replace the functions of the same name in torch.nn.parallel.comm.
FUNCTIONS = (broadcast, broadcast_coalesced, reduce_add_coalesced, scatter, gather)


def for_virtual_gpus(replacement: Callable) -> Callable[[Callable], Callable]:
    """Return the `make` of a row of TABLE.

    The function that `make` returns calls the replacement for virtual GPUs, and the original
    for all other devices.
    """

    def make(original: Callable) -> Callable:
        def choose(first: Any, *args: Any, **kwargs: Any) -> Any:
            function = replacement if _is_for_virtual_gpus(first) else original
            return function(first, *args, **kwargs)

        return choose

    return make


def _is_for_virtual_gpus(tensors: Any) -> bool:
    """Whether the first tensor is on a virtual GPU or on the host."""
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    is_virtual = type(tensors) is VirtualTensor
    return is_virtual or (isinstance(tensors, Tensor) and tensors.device.type == "cpu")


def streams(original: list | None) -> list[torch.Stream | None]:
    """None for each running virtual GPU: torch then makes a stream for each."""
    return [None] * len(current().devices)
