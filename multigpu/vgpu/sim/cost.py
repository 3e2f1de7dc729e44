"""The time of one operation by the roofline model: the longer of the time for its arithmetic
and the time for its memory traffic.

    seconds = max(FLOPs / peak, bytes / bandwidth)

Source: Williams, Waterman and Patterson, "Roofline", Communications of the ACM 52(4), 2009.

FLOPs come from the formulas of torch.utils.flop_counter. An operation without a formula there,
such as an elementwise operation, is memory-bound. The bytes are those of all tensors that the
operation reads, plus those of all tensors that it writes.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from multigpu.vgpu.sim.presets import Gpu

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
# These read a few rows of a large table: about as many bytes as they write.
GATHERS = (aten.embedding, aten.index, aten.index_select, aten.gather)
# These overwrite their first argument without reading it.
WRITERS = (
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.random_,
)


def flops(func: torch._ops.OpOverload, args: Sequence, kwargs: dict, out: object) -> int:
    """FLOPs of one call; 0 if flop_counter has no formula. A multiply-add counts as two."""
    packet = func.overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
    formula: Callable | None = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; an expanded dimension (stride 0) counts once."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * tensor.numel()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(size for size, stride in sizes if stride)


class Costs:
    """The times of one GPU model's operations, cached by operation, shapes and dtypes."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self._cache: dict[tuple, float] = {}

    def seconds(
        self,
        func: torch._ops.OpOverload,
        args: Sequence,
        kwargs: dict,
        read: list,
        out: object,
    ) -> float:
        """Seconds of one call, without launch and kernel overhead.

        `args` and `kwargs` are the payloads that the kernel received, `read` are the virtual
        tensors among the arguments, and `out` is the kernel's result.
        """
        key = [id(func)]
        for tensor in read:
            key.append(tensor.shape)
            key.append(tensor.dtype)
            # An expanded tensor can have the shape of a dense tensor, but fewer bytes.
            key.append(nbytes(tensor._payload))
        if type(out) is torch.Tensor:
            key.append(out.shape)
            key.append(out.dtype)
        elif out is not None:
            key += [tensor.shape for tensor in out if tensor is not None]
        key = tuple(key)
        seconds = self._cache.get(key)
        if seconds is None:
            payloads = [tensor._payload for tensor in read]
            seconds = self._cache[key] = self._roofline(func, args, kwargs, payloads, out)
        return seconds

    def _roofline(
        self,
        func: torch._ops.OpOverload,
        args: Sequence,
        kwargs: dict,
        read: list[torch.Tensor],
        out: object,
    ) -> float:
        packet = func.overloadpacket
        outs: Iterable = out if isinstance(out, (tuple, list)) else (out,)
        written = [tensor for tensor in outs if isinstance(tensor, torch.Tensor)]
        # A foreach operation that returns nothing writes the tensors of its first list.
        if not written and func._schema.is_mutable:
            written = list(args[0])
        traffic = sum(map(nbytes, written))
        if packet in GATHERS:
            traffic *= 2
        elif packet in WRITERS:
            traffic += sum(map(nbytes, read[1:]))
        else:
            traffic += sum(map(nbytes, read))
        arithmetic = flops(func, args, kwargs, out) / self._peak(packet, read)
        return max(traffic / self.gpu.bandwidth, arithmetic)

    def _peak(self, packet: torch._ops.OpOverloadPacket, read: list[torch.Tensor]) -> float:
        """The GPU's peak in FLOP/s for the dtype of the first tensor."""
        dtype = read[0].dtype if read else torch.float32
        if dtype in (torch.float16, torch.bfloat16):
            return self.gpu.fp16
        if dtype in (torch.float64, torch.complex128):
            return self.gpu.fp64
        return self.gpu.tf32 if packet in CONVOLUTIONS else self.gpu.fp32
