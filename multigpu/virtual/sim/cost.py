"""The time of one operation, on the device and on the host.

On the device an operation takes the longer of its arithmetic and its memory traffic:

    seconds = max(arithmetic, ramp + bytes / (bandwidth · share))

This is the roofline model (Williams, Waterman and Patterson, "Roofline", Communications of the
ACM 52(4), 2009) with the shares of the peaks that kernels reach:
- gemm.py: matrix products, in tiles and waves on the SMs
- conv.py: convolutions as implicit matrix products
- attention.py: fused attention, where a causal mask halves the arithmetic
- traffic.py: the bytes, and the share of the bandwidth
- host.py: what eager PyTorch costs the host
The shares are in a GPU's preset (presets.py). A GPU without shares reaches its peaks. Other
operations, such as elementwise ones, are bound by memory traffic.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch.utils.flop_counter import flop_registry

from multigpu.virtual.sim import attention, conv
from multigpu.virtual.sim.gemm import PRODUCTS, Units, product_of, product_seconds, row_lengths
from multigpu.virtual.sim.host import host_seconds
from multigpu.virtual.sim.presets import Gpu
from multigpu.virtual.sim.traffic import (
    BATCH_NORM,
    BATCH_NORM_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    channels_first,
    in_training,
    nbytes,
    traffic,
    traffic_seconds,
)

aten = torch.ops.aten
STRIDED = torch.strided
DOUBLE = (torch.float64, torch.complex128)
CONVOLUTIONS = (conv.FORWARD, conv.BACKWARD)
# In float32 the program chooses how exactly these are computed.
FLOAT32_CHOICE = {*CONVOLUTIONS, *PRODUCTS}
ATTENTION = attention.FORWARD | attention.BACKWARD


# A function of a call's args and kwargs: what its time depends on, beside shapes and dtypes.
Detail = Callable[[Sequence, dict], Hashable]


def _detail(packet: torch._ops.OpOverloadPacket) -> Detail | None:
    """The operation's Detail; None if its time depends on shapes and dtypes alone."""
    if packet in PRODUCTS:
        return lambda args, kwargs: (*row_lengths(args), kwargs.get("beta"))
    if packet is conv.FORWARD:
        # Stride, dilation, whether it is transposed, groups.
        return lambda args, kwargs: (
            channels_first(args[0]), *args[3], *args[5], args[6], args[8],
        )  # fmt: skip
    if packet is conv.BACKWARD:
        # The same, and which gradients are wanted.
        return lambda args, kwargs: (
            channels_first(args[1]), *args[4], *args[6], args[7], args[9], *args[10],
        )  # fmt: skip
    if packet in SOFTMAX:
        return lambda args, kwargs: args[1]  # the dimension
    if packet in SOFTMAX_BACKWARD:
        return lambda args, kwargs: args[2]
    if packet in BATCH_NORM:
        return lambda args, kwargs: (channels_first(args[0]), in_training(args))
    if packet in BATCH_NORM_BACKWARD:
        return lambda args, kwargs: channels_first(args[0])
    if packet in ATTENTION:
        return lambda args, kwargs: attention.is_causal(packet, args)
    return None


def allows_tf32(packet: torch._ops.OpOverloadPacket) -> bool:
    """Whether the program lets a float32 product or convolution run on TF32 units.

    By default PyTorch asks for them in convolutions alone. The numbers are those of full
    float32 in both cases: only the time changes.
    """
    if packet in CONVOLUTIONS:
        return torch.backends.cudnn.conv.fp32_precision == "tf32"
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Costs:
    """The times of one GPU model's operations, cached by operation, shapes and dtypes."""

    def __init__(self, gpu: Gpu, host_factor: float = 1.0):
        """`host_factor` multiplies the host's seconds: 2 for a host that is half as fast."""
        self.gpu = gpu
        self.host_factor = host_factor
        self._cache: dict[tuple, tuple[float, float]] = {}
        # The Detail of each operation, by its id.
        self._details: dict[int, Detail | None] = {}
        self._has_tf32 = gpu.tf32 > gpu.fp32

    def forget(self) -> None:
        """Forget all times: the GPU's figures or the host's factor have changed."""
        self._cache.clear()

    def seconds(
        self,
        func: torch._ops.OpOverload,
        args: Sequence,
        kwargs: dict,
        read: list,
        out: object,
    ) -> tuple[float, float]:
        """Seconds of one call (on the device without the kernel's overhead, on the host).

        `args` and `kwargs` are the payloads that the kernel received, `read` are the virtual
        tensors among the arguments, and `out` is the kernel's result.
        """
        identity = id(func)
        key = [identity]
        for tensor in read:
            # The payload has the same shape, and is read in half of the time.
            payload = tensor._payload
            key.append(payload.shape)
            key.append(payload.dtype)
            # An expanded tensor can have the shape of a dense tensor, but fewer bytes. Strides
            # are cheaper to read than to add up.
            if payload.layout is STRIDED:
                key.append(payload.stride())
            else:
                key.append(nbytes(payload))
        if type(out) is torch.Tensor:
            key.append(out.shape)
            key.append(out.dtype)
        elif out is not None:
            key += [tensor.shape for tensor in out if tensor is not None]
        details = self._details
        if identity not in details:
            details[identity] = self._detail_of(func.overloadpacket)
        detail = details[identity]
        if detail is not None:
            key.append(detail(args, kwargs))
        key = tuple(key)
        cost = self._cache.get(key)
        if cost is None:
            payloads = [tensor._payload for tensor in read]
            device = self._device_seconds(func, args, kwargs, payloads, out)
            cost = self._cache[key] = (device, self.host_factor * host_seconds(func))
        return cost

    def _detail_of(self, packet: torch._ops.OpOverloadPacket) -> Detail | None:
        """The operation's Detail, with the program's choice of TF32 if the GPU has it."""
        detail = _detail(packet)
        if not self._has_tf32 or packet not in FLOAT32_CHOICE:
            return detail
        return lambda args, kwargs: (*detail(args, kwargs), allows_tf32(packet))

    def _device_seconds(
        self,
        func: torch._ops.OpOverload,
        args: Sequence,
        kwargs: dict,
        read: list[torch.Tensor],
        out: object,
    ) -> float:
        """Seconds on the device: the longer of arithmetic and memory traffic."""
        packet = func.overloadpacket
        moved = traffic(func, args, kwargs, read, out, self.gpu)
        dtype = read[0].dtype if read else torch.float32
        peak, units = self._peak(packet, dtype)
        arithmetic = 0.0
        if packet in CONVOLUTIONS:
            arithmetic = conv.convolution_seconds(packet, args, out, self.gpu, peak, units)
            images = args[0 if packet is conv.FORWARD else 1]
            if units != "simt" and self.gpu.shares is not None and channels_first(images):
                # The images, and what has their layout, are transposed before or after: read
                # and written once more.
                arithmetic += traffic_seconds(2 * moved, self.gpu)
        elif packet in ATTENTION:
            arithmetic = attention.attention_seconds(packet, args, self.gpu, peak)
        elif (product := product_of(packet, args)) is not None:
            arithmetic = product_seconds(product, self.gpu, peak, units)
        elif (formula := flop_registry.get(packet)) is not None:
            arithmetic = formula(*args, **kwargs, out_val=out) / peak
        return max(traffic_seconds(moved, self.gpu), arithmetic)

    def _peak(
        self, packet: torch._ops.OpOverloadPacket, dtype: torch.dtype
    ) -> tuple[float, Units]:
        """The GPU's peak in FLOP/s for this dtype, and the units that have it."""
        if dtype is torch.float16 or (dtype is torch.bfloat16 and self.gpu.bf16):
            return self.gpu.fp16, "tensor"
        if dtype in DOUBLE:
            return self.gpu.fp64, "simt"
        if self._has_tf32 and packet in FLOAT32_CHOICE and allows_tf32(packet):
            return self.gpu.tf32, "tf32"
        # bfloat16 without its units, too: cuBLAS has no tensor cores for it, so it computes in
        # float32. On a V100 it reached 9.6 TFLOP/s, float32 14.0 and float16 95 to 100
        # (github.com/lablup/mlxcel, issue 1654).
        return self.gpu.fp32, "simt"
