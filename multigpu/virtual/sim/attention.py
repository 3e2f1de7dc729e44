"""The arithmetic of a fused attention kernel (FlashAttention, or the memory-efficient kernel).

Forward has two matrix products for each head, backward five, because it computes the scores
again. With a causal mask the kernel leaves out the blocks above the diagonal, so it does half
of the arithmetic. A block of 128 queries of one head is on one SM, so few heads leave SMs
idle.

Source: Dao, "FlashAttention-2" (arXiv 2307.08691), sections 3.1 (the causal mask, the number
of products) and 3.2 (one thread block for each block of rows and head).
"""

from collections.abc import Sequence
from math import ceil

import torch

from multigpu.virtual.sim.presets import Gpu

aten = torch.ops.aten
# The operations, each with the position of its argument `is_causal`.
FORWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_efficient_attention: 6,
}
BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    aten._scaled_dot_product_efficient_attention_backward: 11,
}
BLOCK = 128


def is_causal(packet: torch._ops.OpOverloadPacket, args: Sequence) -> bool:
    """The argument `is_causal` of one call."""
    place = (FORWARD | BACKWARD)[packet]
    return len(args) > place and bool(args[place])


def flops(packet: torch._ops.OpOverloadPacket, args: Sequence) -> float:
    """FLOPs of one call; a multiply-add counts as two."""
    query, key, value = args[:3] if packet in FORWARD else args[1:4]
    batch, heads, rows, width = query.shape
    columns = key.shape[2]
    pairs = batch * heads * rows * columns * (0.5 if is_causal(packet, args) else 1)
    if packet in FORWARD:
        return 2 * pairs * (width + value.shape[3])
    return 2 * pairs * (3 * width + 2 * value.shape[3])


def attention_seconds(
    packet: torch._ops.OpOverloadPacket, args: Sequence, gpu: Gpu, peak: float
) -> float:
    """Seconds of the arithmetic of one call; `peak` is in FLOP/s."""
    seconds = flops(packet, args) / peak
    if gpu.shares is None:
        return seconds
    backward = packet in BACKWARD
    query = args[1] if backward else args[0]
    blocks = query.shape[0] * query.shape[1] * ceil(query.shape[2] / BLOCK)
    waves = ceil(blocks / gpu.shares.sms)
    idle = waves * gpu.shares.sms / blocks
    share = gpu.shares.attention_backward if backward else gpu.shares.attention
    return seconds * idle / share
