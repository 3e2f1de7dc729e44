"""DataParallel's copies between virtual GPUs, in the place of torch.nn.parallel.comm's.

torch's own are written in C++, for CUDA and NCCL. These have the same signatures and results.
While virtual GPUs run they stand in for torch's; tensors of other devices still go to torch's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigpu.vgpu.ops.tensor import VirtualTensor
from multigpu.vgpu.sim.machine import current

Tensor = torch.Tensor
# As in torch: an index of a device, -1 for the CPU.
Device = int | str | torch.device
# Bytes of a bucket, as in torch.
BUFFER_SIZE = 10485760


def _device(index: Device) -> torch.device:
    if isinstance(index, int):
        return torch.device("cpu") if index == -1 else torch.device("vgpu", index)
    return torch.device(index)


def _buckets(tensors: Sequence[Tensor], nbytes: int) -> list[list[Tensor]]:
    return list(torch._utils._take_tensors(list(tensors), nbytes))


def _flatten(bucket: Sequence[Tensor]) -> Tensor:
    return torch._utils._flatten_dense_tensors(bucket)


def _unflatten(flat: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of their own with the shapes of the bucket's."""
    return [part.clone() for part in torch._utils._unflatten_dense_tensors(flat, bucket)]


def _in_order_of(tensors: Sequence[Tensor], copies: list[Tensor]) -> list[Tensor]:
    """The copies in the order of the tensors: buckets hold one type each, which changes it."""
    return list(torch._utils._reorder_tensors_as(copies, list(tensors)))


def broadcast(
    tensor: Tensor,
    devices: Sequence[Device] | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Copies of the tensor on the devices; for its own device, the tensor itself."""
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, "
            f"but got devices={devices} and out={out}"
        )
    if out is not None:
        return tuple(target.copy_(tensor, non_blocking=True) for target in out)
    return tuple(tensor.to(_device(device), non_blocking=True) for device in devices)


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[Device], buffer_size: int = BUFFER_SIZE
) -> list[list[Tensor]]:
    """For each device a list of copies.

    Buckets of `buffer_size` bytes travel as one copy, as with NCCL.
    """
    # DataParallel calls this before it starts its threads, one for each device.
    current().clock.num_replica_threads = len(devices)
    sources = [tensor.detach() for tensor in tensors]
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
    """inputs[device][i] → the sums over the devices, on the destination.

    Buckets of `buffer_size` bytes travel as one copy. Without a destination, the first
    device's.
    """
    target = _device(inputs[0][0].get_device() if destination is None else destination)
    root = next((i for i, tensors in enumerate(inputs) if tensors[0].device == target), None)
    if root is None:
        raise RuntimeError(
            "reduce_add expects destination to be on the same GPU with one of the tensors"
        )
    root_first = [inputs[root], *(tensors for i, tensors in enumerate(inputs) if i != root)]
    buckets_of = [_buckets(tensors, buffer_size) for tensors in root_first]
    sums = []
    for root_bucket, *other_buckets in zip(*buckets_of, strict=True):
        flat = _flatten(root_bucket)
        for bucket in other_buckets:
            flat = flat + _flatten(bucket).to(target, non_blocking=True)
        sums += _unflatten(flat, root_bucket)
    return tuple(_in_order_of(inputs[root], sums))


def scatter(
    tensor: Tensor,
    devices: Sequence[Device] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence[torch.Stream | None] | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Chunks of the tensor, one for each device: equal ones, or of the given sizes.

    With `streams`, which DataParallel gives for a tensor of the host, the copies run beside
    the computation.
    """
    if out is not None:
        chunks = tensor.split([target.size(dim) for target in out], dim)
        return tuple(
            target.copy_(chunk, non_blocking=True)
            for target, chunk in zip(out, chunks, strict=True)
        )
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    on_side_stream = any(stream is not None for stream in streams or ())
    with current().clock.on_side_stream(on_side_stream):
        # A batch smaller than the number of devices has fewer chunks.
        return tuple(
            chunk.to(_device(device), non_blocking=True)
            for chunk, device in zip(chunks, devices, strict=False)
        )


def gather(
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: Device | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The tensors of several devices, concatenated along `dim` on the destination.

    Without a destination, the current device; -1 is the CPU.
    """
    if out is not None:
        target = out.device
    elif destination is None:
        target = _device(torch.vgpu.current_device())
    else:
        target = _device(destination)
    non_blocking = target.type != "cpu"
    whole = torch.cat(
        [tensor.to(target, non_blocking=non_blocking) for tensor in tensors], dim
    )
    return whole if out is None else out.copy_(whole)


# What stands in for the functions of the same name in torch.nn.parallel.comm.
FUNCTIONS = (broadcast, broadcast_coalesced, reduce_add_coalesced, scatter, gather)


def for_virtual_gpus(replacement: Callable) -> Callable[[Callable], Callable]:
    """For a row of the table: a function that calls the replacement for virtual GPUs.

    For all other devices it calls the original.
    """

    def make(original: Callable) -> Callable:
        def choose(first: Any, *args: Any, **kwargs: Any) -> Any:
            function = replacement if _is_for_virtual_gpus(first) else original
            return function(first, *args, **kwargs)

        return choose

    return make


def _is_for_virtual_gpus(tensors: Any) -> bool:
    """Whether the first tensor is on a virtual GPU, or, without CUDA, on the host."""
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    return type(tensors) is VirtualTensor or (
        isinstance(tensors, Tensor)
        and tensors.device.type == "cpu"
        and not torch.cuda.is_available()
    )


def streams(original: list | None) -> list[torch.Stream]:
    """One stream for each running virtual GPU."""
    return [torch.Stream(device=device) for device in current().devices]
