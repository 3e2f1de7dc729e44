"""The time of a matrix product on the SMs of a GPU: tiles, waves, and the sizes that tensor
cores want.

A library such as cuBLAS divides C (m × n) into tiles. Each SM computes one tile at a time, so
a product needs ceil(tiles / SMs) waves, and each wave takes as long as a full tile:
- Tile quantization: a tile that reaches over the edge of C takes as long as a whole one.
- Wave quantization: a last wave with one tile takes as long as a full wave.
- Splits of K: if C has few tiles, the library divides the sum over k among several SMs and
  adds the partial sums, which costs memory traffic.
- Alignment: a tensor core's operands are loaded in pieces of 16 bytes. A row whose length is
  no multiple of 16 bytes is loaded in smaller pieces.
The library's choice among tile sizes and splits is taken to be the fastest one.

Source: NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001, 2023), sections
2.1 to 3.2: the tile sizes, both quantizations, and rows of a multiple of 16 bytes.
"""

from collections.abc import Sequence
from math import ceil, gcd
from typing import Literal, NamedTuple

import torch

from multigpu.virtual.sim.presets import Gpu

aten = torch.ops.aten
# The tiles of cuBLAS that the guide names (section 2.3), and smaller ones for small products.
TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (32, 32),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32, 64)
# An SM reads tm + tn values from the L2 cache for tm · tn multiply-adds, so a small tile is
# slower: its share is (1 + c · (1/256 + 1/128)) / (1 + c · (1/tm + 1/tn)). The guide's section
# 2.3 says in which order the tiles are. c is an assumption: a tile of 64 × 64 reaches 76% of
# the largest tile's rate. CUDA cores are slower, so they wait less for data.
TILE_COST_TENSOR = 20
TILE_COST_SIMT = 4
# The step of a tile's loop over k: CUTLASS's defaults (include/cutlass/gemm/device/
# default_gemm_configuration.h) are 32 on Volta's tensor cores and 8 on CUDA cores.
STEP_TENSOR = 32
STEP_SIMT = 8
# The share of a tensor core's rate if the length of a row is a multiple of 2 bytes, but not
# of 4. It is calibrated on the rows of vtrain.csv with 2 GPUs (benchmarks/vtrain.py), which
# have the product with the 50,257 words of GPT-2's vocabulary. With 16 bytes the share is 1,
# and from 16 to 8, 4 and 2 bytes it falls by the same factor: for 8 and 4 an assumption.
ODD_ROWS = 0.31
ALIGNED = 16

# The matrix products, and the places of their two matrices among the arguments.
PRODUCTS = {aten.mm: (0, 1), aten.bmm: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2)}
# The units that compute a product: the names of the shares in presets.Shares.
Units = Literal["tensor", "tf32", "simt"]


class Product(NamedTuple):
    """`batch` matrix products (m × k) @ (k × n).

    `row_bytes` is the largest power of two, up to 16, that divides the length in bytes of each
    row of the three matrices.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    row_bytes: int = ALIGNED


def product_of(
    packet: torch._ops.OpOverloadPacket, args: Sequence[torch.Tensor]
) -> Product | None:
    """The product that an operation of PRODUCTS computes; None for other operations."""
    if packet not in PRODUCTS:
        return None
    a, b = (args[place] for place in PRODUCTS[packet])
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = a.shape[0] if a.dim() == 3 else 1
    rows = (*row_lengths((a, b)), n)
    return Product(m, n, k, batch, gcd(ALIGNED, *(row * a.element_size() for row in rows)))


def row_lengths(args: Sequence) -> list[int]:
    """For each matrix, the elements from one row to the next; if transposed, of one column.

    0 for a number, which can be what a product is added to.
    """
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return [max(tensor.stride()[-2:], default=0) for tensor in tensors]


def product_seconds(product: Product, gpu: Gpu, peak: float, units: Units) -> float:
    """Seconds of the arithmetic, with the fastest tile; `peak` is in FLOP/s.

    Memory traffic of the operands is not included, but that of the partial sums is.
    """
    m, n, k, batch, row_bytes = product
    shares = gpu.shares
    if shares is None:
        return 2 * batch * m * n * k / peak
    rate = peak * getattr(shares, units) / shares.sms
    weight, step = TILE_COST_SIMT, STEP_SIMT
    if units != "simt":
        rate *= alignment_share(row_bytes)
        weight, step = TILE_COST_TENSOR, STEP_TENSOR
    best = float("inf")
    for rows, columns in TILES:
        share = (1 + weight * (1 / 256 + 1 / 128)) / (1 + weight * (1 / rows + 1 / columns))
        tiles = ceil(m / rows) * ceil(n / columns) * batch
        for splits in SPLITS:
            steps = ceil(k / splits / step)
            if splits > 1 and steps < 4:
                break
            waves = ceil(tiles * splits / shares.sms)
            seconds = waves * 2 * rows * columns * steps * step / (rate * share)
            if splits > 1:
                # Each split writes float32 sums, and a second kernel reads them.
                seconds += 8 * splits * batch * m * n / (gpu.bandwidth * shares.memory)
            best = min(best, seconds)
    return best


def alignment_share(row_bytes: int) -> float:
    """The share of a tensor core's rate with rows of this alignment."""
    halvings = (ALIGNED // row_bytes).bit_length() - 1
    return ODD_ROWS ** (min(halvings, 3) / 3)
