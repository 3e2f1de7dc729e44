"""Quantisation to bytes: 255 equal intervals between the minimum and the maximum of a chunk.

    q = round((x − min) / (max − min) · 255)

The message for N numbers x has N + 8 bytes: min and max as float32, then q. The dequantised
numbers differ from x by at most (max − min) / 510, half an interval, and float32's rounding.
Bagua multiplies by 255 / (range + 1e-7) instead, and rounds the offset, too. Its bytes wrap
around if a chunk is constant or far from 0, so this is not done here.
"""

import torch

HEADER = 8  # bytes


def compress(x: torch.Tensor) -> torch.Tensor:
    """(…, N) floating point, N ≥ 1 → (…, N + 8) uint8: one message per row.

    A chunk of equal numbers is restored exactly if float32 can represent the number. If a
    chunk contains a NaN or an infinity, or its range exceeds float32's, all of it is restored
    as NaN. A diverged loss is therefore visible on every rank.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    low, high = (bound.float() for bound in wide.aminmax(dim=-1))
    low = torch.where(torch.isfinite(high - low), low, torch.nan)
    start = low.to(wide.dtype).unsqueeze(-1)
    span = (high - low).to(wide.dtype).unsqueeze(-1)
    scaled = (wide - start) / span * 255
    # 0 / 0, in a constant chunk, becomes 0. float32's rounding of a float64 minimum can make a
    # level negative, so clamp.
    levels = scaled.nan_to_num(0.0).round().clamp(0, 255).to(torch.uint8)
    return torch.cat([torch.stack([low, high], dim=-1).view(torch.uint8), levels], dim=-1)


def decompress(message: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(…, N + 8) uint8 from `compress` → (…, N) of `dtype`; equal bytes give equal numbers."""
    wide = torch.promote_types(dtype, torch.float32)
    # Copied, because a row can start at an address that is not aligned for float32.
    header = message[..., :HEADER].clone().view(torch.float32).to(wide)
    low = header[..., :1]
    high = header[..., 1:]
    # lerp restores min and max exactly. min + q / 255 · (max − min) does not.
    return torch.lerp(low, high, message[..., HEADER:].to(wide) / 255).to(dtype)
