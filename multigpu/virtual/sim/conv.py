"""Convolutions as the matrix products that cuDNN computes without building the matrices.

Implicit GEMM, with n images, c input channels, k output channels, r × s weights and p × q
output positions:

    forward            (n·p·q) × (c·r·s) @ (c·r·s) × k
    gradient of input  (n·p·q) × k       @ k × (c·r·s)       summed into the input's places
    of the weight      k × (n·p·q)       @ (n·p·q) × (c·r·s)

Tensor cores read images with the channels last (NHWC). For images with the channels first, the
default of PyTorch, cuDNN transposes the operands before and after: additional memory traffic.

Sources: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (arXiv 1410.0759);
NVIDIA, "Convolutional Layers User's Guide", sections on implicit GEMM and on tensor layouts.
"""

from collections.abc import Sequence
from math import gcd, prod

import torch

from multigpu.virtual.sim.gemm import ALIGNED, Product, Units, product_seconds
from multigpu.virtual.sim.presets import Gpu

aten = torch.ops.aten
FORWARD = aten.convolution
BACKWARD = aten.convolution_backward
# Winograd's algorithm F(2 × 2, 3 × 3) computes 4 outputs with 16 multiplications instead of
# 36: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (arXiv 1509.09308).
WINOGRAD = 36 / 16
# For tensor cores fewer channels are padded to this number of bytes, such as an image's 3.
PAD = 16


def products(
    packet: torch._ops.OpOverloadPacket, args: Sequence, out: object, units: Units
) -> list[Product]:
    """The matrix products of one call of convolution or convolution_backward.

    `out` is the call's result.
    """
    if packet is FORWARD:
        images, weight, transposed, groups = args[0], args[1], args[6], args[8]
        wanted = (True, False, False)
        outputs_of = out
    else:
        grad, images, weight, transposed, groups = *args[:3], args[7], args[9]
        wanted = (False, *args[10][:2])
        outputs_of = grad
    size = images.element_size()
    pad = 1 if units == "simt" else PAD // size
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    outputs //= groups
    inputs = images.shape[1] // groups
    taps = prod(weight.shape[2:])
    grid = (images if transposed else outputs_of).shape[2:]
    places = images.shape[0] * prod(grid)
    rows = gcd(ALIGNED, *(max(channels, pad) * size for channels in (inputs, outputs)))
    if transposed:
        # A transposed convolution is the input gradient of a convolution.
        inputs, outputs = outputs, inputs
    deep = max(inputs, pad) * taps
    forward = Product(places, outputs, deep, groups, rows)
    by_input = Product(places, deep, outputs, groups, rows)
    by_weight = Product(outputs, deep, places, groups, rows)
    if transposed:
        forward, by_input = by_input, forward
    chosen = zip((forward, by_input, by_weight), wanted, strict=True)
    return [product for product, is_wanted in chosen if is_wanted]


def convolution_seconds(
    packet: torch._ops.OpOverloadPacket,
    args: Sequence,
    out: object,
    gpu: Gpu,
    peak: float,
    units: Units,
) -> float:
    """Seconds of the arithmetic of one call with the result `out`; `peak` is in FLOP/s."""
    seconds = sum(
        product_seconds(product, gpu, peak, units)
        for product in products(packet, args, out, units)
    )
    if gpu.shares is None:
        return seconds
    if units == "simt" and uses_winograd(packet, args):
        seconds /= WINOGRAD
    return seconds / gpu.shares.convolution


def uses_winograd(packet: torch._ops.OpOverloadPacket, args: Sequence) -> bool:
    """Whether cuDNN can use Winograd's algorithm: 3 × 3 in float32 with stride 1."""
    first = 0 if packet is FORWARD else 1
    images, weight = args[first], args[first + 1]
    stride, dilation, transposed = args[first + 3], args[first + 5], args[first + 6]
    if images.dtype is not torch.float32 or transposed:
        return False
    return tuple(weight.shape[2:]) == (3, 3) and set(stride) == set(dilation) == {1}
