"""How does DataParallel move tensors between virtual GPUs? Versions of torch.nn.parallel.comm's functions for them.

Torch's own are written in C++ for CUDA and NCCL. These have the same signatures and results, and are put in their place
while virtual GPUs run; tensors of other devices still go to torch's.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import _functions, comm

from multigpu.vgpu.ops.tensor import VirtualTensor
from multigpu.vgpu.sim.machine import current

Tensor = torch.Tensor


def _device(index: int | str | torch.device) -> torch.device:
    if isinstance(index, int):
        return torch.device("cpu") if index == -1 else torch.device("vgpu", index)
    return torch.device(index)


def broadcast(
    tensor: Tensor, devices: Sequence | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Copies of the tensor on the devices; the one that it lies on gets the tensor itself."""
    if (devices is None) == (out is None):
        raise RuntimeError(
            f"Exactly one of 'devices' and 'out' must be specified, but got devices={devices} and out={out}"
        )
    if out is not None:
        return tuple(target.copy_(tensor, non_blocking=True) for target in out)
    return tuple(tensor.to(_device(device), non_blocking=True) for device in devices)


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence, buffer_size: int = 10485760
) -> list[list[Tensor]]:
    """For each device a list of copies. Buckets of `buffer_size` bytes travel as one copy, as NCCL's version sends them."""
    current().clock.sharing = len(devices)  # DataParallel's threads, one a device, come next
    copies = [[] for _ in devices]
    for place, device in zip(copies, map(_device, devices), strict=True):
        if tensors and device == tensors[0].device:
            place.extend(
                tensor.detach() for tensor in tensors
            )  # the first replica shares the module's own tensors
            continue
        for bucket in torch._utils._take_tensors(
            [tensor.detach() for tensor in tensors], buffer_size
        ):
            flat = torch._utils._flatten_dense_tensors(bucket).to(device, non_blocking=True)
            place.extend(
                part.clone() for part in torch._utils._unflatten_dense_tensors(flat, bucket)
            )
        place[:] = torch._utils._reorder_tensors_as(place, list(tensors))
    return copies


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]],
    destination: int | None = None,
    buffer_size: int = 10485760,
) -> tuple[Tensor, ...]:
    """inputs[device][i] → the sums over the devices, on the destination; buckets travel as one copy."""
    target = _device(inputs[0][0].get_device() if destination is None else destination)
    root = next((i for i, tensors in enumerate(inputs) if tensors[0].device == target), None)
    if root is None:
        raise RuntimeError(
            "reduce_add expects destination to be on the same GPU with one of the tensors"
        )
    order = [inputs[root], *(tensors for i, tensors in enumerate(inputs) if i != root)]
    sums = []
    for buckets in zip(
        *(torch._utils._take_tensors(list(tensors), buffer_size) for tensors in order),
        strict=True,
    ):
        flat = torch._utils._flatten_dense_tensors(buckets[0])
        for bucket in buckets[1:]:
            flat = flat + torch._utils._flatten_dense_tensors(bucket).to(
                target, non_blocking=True
            )
        sums.extend(
            part.clone() for part in torch._utils._unflatten_dense_tensors(flat, buckets[0])
        )
    return tuple(torch._utils._reorder_tensors_as(sums, list(order[0])))


def scatter(
    tensor: Tensor,
    devices: Sequence | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Sequence | None = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Pieces of the tensor, one a device: equal ones as torch.chunk cuts them, or of the given sizes.

    With `streams`, which DataParallel gives for a tensor of the host, they travel beside the computation.
    """
    if out is not None:
        sizes = [target.size(dim) for target in out]
        return tuple(
            target.copy_(piece, non_blocking=True)
            for target, piece in zip(out, tensor.split(sizes, dim), strict=True)
        )
    pieces = (
        tensor.chunk(len(devices), dim)
        if chunk_sizes is None
        else tensor.split(list(chunk_sizes), dim)
    )
    with current().clock.on_side_stream(any(stream is not None for stream in streams or ())):
        return tuple(
            piece.to(_device(device), non_blocking=True)
            for piece, device in zip(pieces, devices, strict=False)
        )


def gather(
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: int | torch.device | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The tensors of several devices, one after the other, on the destination; -1 is the CPU."""
    target = (
        out.device
        if out is not None
        else _device(current_device() if destination is None else destination)
    )
    whole = torch.cat(
        [tensor.to(target, non_blocking=target.type != "cpu") for tensor in tensors], dim
    )
    return whole if out is None else out.copy_(whole)


def current_device() -> int:
    return torch.vgpu.current_device()


def install() -> Callable[[], None]:
    """Put these in the place of torch's for virtual tensors. Calling what is returned puts torch's back."""
    ours = {
        f.__name__: f
        for f in (broadcast, broadcast_coalesced, reduce_add_coalesced, scatter, gather)
    }
    theirs = {name: getattr(comm, name) for name in ours}
    for name in ours:
        setattr(comm, name, _choose(ours[name], theirs[name]))
    streams = _functions._streams
    # DataParallel takes a stream for each copy from the host; torch would count the devices by its guard, which knows one.
    _functions._streams = [torch.Stream(device=device) for device in current().devices]

    def undo() -> None:
        for name, function in theirs.items():
            setattr(comm, name, function)
        _functions._streams = streams

    return undo


def _choose(ours: Callable, theirs: Callable) -> Callable:
    def chosen(first, *args, **kwargs):
        return (ours if _virtual(first, args, kwargs) else theirs)(first, *args, **kwargs)

    return chosen


def _virtual(first, args: tuple, kwargs: dict) -> bool:
    """Does a call concern virtual GPUs? Its tensors say so, or the running devices if they are the host's."""
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return type(first) is VirtualTensor or (
        isinstance(first, Tensor)
        and first.device.type == "cpu"
        and not torch.cuda.is_available()
    )
