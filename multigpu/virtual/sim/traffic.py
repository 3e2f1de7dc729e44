"""The bytes that an operation moves between the GPU's memory and its SMs.

An operation reads its arguments and writes its results once, except for those in PASSES, whose
kernels read an argument several times because it does not fit into an SM.
"""

from collections.abc import Iterable, Sequence
from math import prod

import torch

from multigpu.virtual.sim.presets import Gpu

aten = torch.ops.aten
# These read a few rows of a large table: about as many bytes as they write.
GATHERS = (aten.embedding, aten.index, aten.index_select, aten.gather)
# These overwrite their first argument, a tensor or a list, without reading it.
WRITERS = (
    aten.copy_,
    aten._foreach_copy_,
    aten._foreach_zero_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.random_,
)
# These do not read their first argument if beta is 0.
ADDING_PRODUCTS = (aten.addmm, aten.baddbmm)
# Batch norm reads a batch once for its mean and variance, and again to normalise it; its
# backward reads the batch and the gradient twice (PyTorch's Normalization.cuh). With the
# channels last, a persistent kernel keeps on the SMs what fits there, and reads the rest again
# (PyTorch's cudnn/BatchNorm.cpp chooses CUDNN_BATCHNORM_SPATIAL_PERSISTENT).
BATCH_NORM = (aten.native_batch_norm, aten.cudnn_batch_norm, aten._native_batch_norm_legit)
BATCH_NORM_BACKWARD = (aten.native_batch_norm_backward, aten.cudnn_batch_norm_backward)
# The persistent kernel computes 64 channels at a time. A thread keeps 15 pixels of 4 channels
# in registers and shared memory in forward, and in backward 8 pixels of two tensors; an SM has
# 2 blocks of 512 threads. In 2-byte numbers that is about 120 KiB per SM. Source: NVIDIA's own
# kernel for this layout, github.com/NVIDIA/apex, apex/contrib/csrc/groupbn/batch_norm.h and
# nhwc_batch_norm_kernel.h; cuDNN's, which is not published, is taken to be like it.
PERSISTENT_CHANNELS = 64
PERSISTENT_BYTES = 120 * 1024
GROUP_NORM = (aten.native_group_norm,)
# Softmax reads a row three times if it is longer than 1,024 (largest value, sum, result), and
# its backward twice (PyTorch's SoftMax.cu and PersistentSoftmax.cuh).
SOFTMAX = (aten._softmax, aten._log_softmax)
SOFTMAX_BACKWARD = (aten._softmax_backward_data, aten._log_softmax_backward_data)
PERSISTENT_ROW = 1024


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; an expanded dimension (stride 0) counts once."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * tensor.numel()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(size for size, stride in sizes if stride)


def traffic(
    func: torch._ops.OpOverload,
    args: Sequence,
    kwargs: dict,
    read: Sequence[torch.Tensor],
    out: object,
    gpu: Gpu,
) -> float:
    """Bytes that one call reads and writes on `gpu`.

    `read` are the tensors among the arguments. A tensor in `out=` is written and not read.
    """
    packet = func.overloadpacket
    outs = _out_arguments(func, kwargs)
    ids = {id(tensor) for tensor in outs}
    read = [tensor for tensor in read if id(tensor) not in ids]
    written = outs or _results(func, args, kwargs, out)
    total = sum(map(nbytes, written))
    if packet in GATHERS:
        return 2 * total
    if packet in WRITERS:
        return total + sum(map(nbytes, read[len(written) :]))
    if packet in ADDING_PRODUCTS and kwargs.get("beta") == 0:
        read = read[1:]
    return total + sum(map(nbytes, read)) + _read_again(packet, args, read, gpu)


def _out_arguments(func: torch._ops.OpOverload, kwargs: dict) -> list[torch.Tensor]:
    """The tensors given as `out=`."""
    if not kwargs:
        return []
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    return list(_tensors(kwargs.get(name) for name in names))


def _results(
    func: torch._ops.OpOverload, args: Sequence, kwargs: dict, out: object
) -> list[torch.Tensor]:
    """The tensors that the call has written: its results, or its changed arguments."""
    written = list(_tensors([out]))
    if written or not func._schema.is_mutable:
        return written
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written += _tensors([value])
    return written


def _tensors(values: Iterable) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _read_again(
    packet: torch._ops.OpOverloadPacket,
    args: Sequence,
    read: Sequence[torch.Tensor],
    gpu: Gpu,
) -> float:
    """The bytes that a kernel reads more than once, without the first time."""
    if packet in BATCH_NORM:
        return _not_kept(read[:1], gpu) if in_training(args) else 0
    if packet in GROUP_NORM:
        return nbytes(read[0])
    if packet in BATCH_NORM_BACKWARD:
        return _not_kept(read[:2], gpu)
    if packet in SOFTMAX and _row(read[0], args[1]) > PERSISTENT_ROW:
        return 2 * nbytes(read[0])
    if packet in SOFTMAX_BACKWARD and _row(read[0], args[2]) > PERSISTENT_ROW:
        return nbytes(read[0]) + nbytes(read[1])
    return 0


def _row(tensor: torch.Tensor, dim: int) -> int:
    """The elements of one row along `dim`; a number is one."""
    return tensor.shape[dim] if tensor.dim() else 1


def _not_kept(tensors: Sequence[torch.Tensor], gpu: Gpu) -> float:
    """The bytes of a batch norm's tensors that its kernel does not keep on the SMs."""
    size = sum(map(nbytes, tensors))
    first = tensors[0]
    if channels_first(first):
        return size
    if gpu.shares is None or not size:
        return 0
    together = size * min(1, PERSISTENT_CHANNELS / first.shape[1])
    return size * max(0, 1 - gpu.shares.sms * PERSISTENT_BYTES / together)


def in_training(args: Sequence) -> bool:
    """Whether one of BATCH_NORM normalises by the batch's own mean and variance.

    Their last three arguments are training, momentum and eps.
    """
    return args[-3]


def channels_first(images: torch.Tensor) -> bool:
    """Whether a batch of images is not stored with the channels last."""
    if images.dim() != 4:
        return True
    return not images.is_contiguous(memory_format=torch.channels_last)


def traffic_seconds(count: float, gpu: Gpu) -> float:
    """Seconds for `count` bytes: the ramp, then the share of the bandwidth that is reached.

    The ramp is the time until the first bytes arrive and the last ones are written, so a small
    tensor reaches only a part of the bandwidth.
    """
    if gpu.shares is None:
        return count / gpu.bandwidth
    return gpu.shares.ramp + count / (gpu.bandwidth * gpu.shares.memory)
