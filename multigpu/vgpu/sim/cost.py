"""How long does an operation take? The roofline: what takes longer, its arithmetic or its memory traffic.

    seconds = max(FLOPs / peak, bytes / bandwidth)          (Williams, Waterman and Patterson, CACM 52(4), 2009)

FLOPs come from the formulas of torch.utils.flop_counter; an operation that has none there, as an elementwise one, is
bound by memory. Bytes are those of the tensors that it reads and of those that it writes, each counted once.
"""

from collections.abc import Callable
from math import prod

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from multigpu.vgpu.sim.presets import Gpu

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
# These touch a few rows of a large table: what they read is about as much as what they write.
GATHERS = (aten.embedding, aten.index, aten.index_select, aten.gather)
# These write without reading what was there.
WRITERS = (
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.random_,
)


def flops(func: torch._ops.OpOverload, args: tuple, kwargs: dict, out: object) -> int:
    """FLOPs of one call, 0 where flop_counter has no formula; a multiplication and an addition are two."""
    packet = func.overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
    formula: Callable | None = flop_registry.get(packet)
    return formula(*args, **kwargs, out_val=out) if formula else 0


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's numbers; an expanded dimension (stride 0) is read once."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * tensor.numel()
    return tensor.element_size() * prod(
        n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step
    )


class Costs:
    """The times of one GPU model's operations, remembered by operation, shapes and types."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.known: dict[tuple, float] = {}

    def seconds(
        self, func: Callable, args: list, kwargs: dict, read: list, out: object
    ) -> float:
        """The time of one call on payloads: `read` are the virtual tensors among its arguments, `out` is its result."""
        key = [id(func)]
        for tensor in read:
            key.append(tensor.shape)
            key.append(tensor.dtype)
            key.append(
                nbytes(tensor._payload)
            )  # an expanded tensor has the shape of a dense one, and less to read
        if type(out) is torch.Tensor:
            key.append(out.shape)
            key.append(out.dtype)
        elif out is not None:
            key += [tensor.shape for tensor in out if tensor is not None]
        key = tuple(key)
        seconds = self.known.get(key)
        if seconds is None:
            written = out if isinstance(out, (tuple, list)) else (out,)
            payloads = [tensor._payload for tensor in read]
            seconds = self.known[key] = self._seconds(
                func, args, kwargs, payloads, written, out
            )
        return seconds

    def _seconds(
        self, func, args: tuple, kwargs: dict, read: list, written: tuple, out: object
    ) -> float:
        packet = func.overloadpacket
        results = [tensor for tensor in written if isinstance(tensor, torch.Tensor)]
        if (
            not results and func._schema.is_mutable
        ):  # a foreach operation that returns nothing writes its first list
            results = list(args[0])
        traffic = sum(map(nbytes, results))
        if packet in GATHERS:
            traffic *= 2
        elif packet in WRITERS:
            traffic += sum(map(nbytes, read[1:]))
        else:
            traffic += sum(map(nbytes, read))
        return max(
            traffic / self.gpu.bandwidth,
            flops(func, args, kwargs, out) / self._peak(packet, read),
        )

    def _peak(self, packet: torch._ops.OpOverloadPacket, read: list[torch.Tensor]) -> float:
        dtype = read[0].dtype if read else torch.float32
        if dtype in (torch.float16, torch.bfloat16):
            return self.gpu.fp16
        if dtype in (torch.float64, torch.complex128):
            return self.gpu.fp64
        return self.gpu.tf32 if packet in CONVOLUTIONS else self.gpu.fp32
