"""How does a number become a byte? Between the smallest and the largest of a chunk lie 255 equal intervals.

    q = round((x − min) / (max − min) · 255)

Of N numbers x a message has N + 8 bytes: min and max as float32, then q. What comes back differs from x by at most
(max − min) / 510, half an interval, and float32's rounding. Bagua's formula multiplies by 255 / (range + 1e-7) and
rounds the offset, too, which wraps around for a chunk that is constant or far from 0: not copied here.
"""

import torch

HEADER = 8  # bytes


def compress(x: torch.Tensor) -> torch.Tensor:
    """(…, N) floating point, N ≥ 1 → (…, N + 8) uint8: a message for each row.

    A chunk of equal numbers comes back exactly, if float32 has that number. A chunk with a NaN or an infinity, or with a
    range that float32 does not hold, comes back as NaN, all of it: a loss that has gone wrong is seen on every rank.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    low, high = (end.float() for end in wide.aminmax(dim=-1))
    low = torch.where(torch.isfinite(high - low), low, torch.nan)
    start, span = low.to(wide.dtype).unsqueeze(-1), (high - low).to(wide.dtype).unsqueeze(-1)
    # 0 / 0, of a constant chunk, becomes 0. float32's rounding of a float64 min can bring a level below 0: clamp.
    levels = (
        ((wide - start) / span * 255).nan_to_num(0.0).round().clamp(0, 255).to(torch.uint8)
    )
    return torch.cat([torch.stack([low, high], dim=-1).view(torch.uint8), levels], dim=-1)


def expand(message: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(…, N + 8) uint8, as `compress` makes it → (…, N) of `dtype`: the same numbers wherever the bytes are the same."""
    wide = torch.promote_types(dtype, torch.float32)
    header = (
        message[..., :HEADER].clone().view(torch.float32).to(wide)
    )  # a copy: a row may start at an odd address
    # lerp gives min and max themselves at its ends, which min + q / 255 · (max − min) does not.
    return torch.lerp(
        header[..., :1], header[..., 1:], message[..., HEADER:].to(wide) / 255
    ).to(dtype)
