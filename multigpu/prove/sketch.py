"""Sketches: 64 sums with random signs, whose distance estimates the distance of two tensors.

The element with flat index i of a tensor is added, with a random sign, to one of 64 sums. The
squared norm of the sums is an unbiased estimate of the tensor's squared norm, with a relative
standard deviation of about sqrt(2 / 64), 18% (Charikar, Chen, Farach-Colton: Finding frequent
items in data streams, 2002; Thorup, Zhang 2012). A sketch is linear: the sketches of a
difference and of disjoint parts are the difference and the sum of sketches. So ranks that hold
parts of a parameter record sketches of their parts, and need not communicate.

The signs are products, sign of a chunk × sign of the place in the chunk: the tables are small,
and most of the work is one product of a matrix and a vector. The signs of a short chunk's
places can add up to zero, and then a change that all elements share would not be seen: smaller
tensors have chunks of one element. A tensor with at most 64 elements is its own sketch.
"""

import functools

import numpy as np
import torch

SUMS = 64
# At least so many chunks, so that each of the 64 sums gets several.
CHUNKS = 256
LONGEST_CHUNK = 1024
SHORTEST_CHUNK = 64
# The elements of one conversion to float32, which bounds its memory to 4 MB.
SLAB = 2**20


def sketch(values: torch.Tensor, numel: int, start: int = 0) -> np.ndarray:
    """The sketch, float64 (64,), of a part of a tensor.

    `values` are elements of the flattened tensor, on the host, (n,), which begin at its index
    `start`; `numel` is the number of elements of the whole tensor.
    """
    chunk = chunk_length(numel)
    if values.dtype == torch.float64 or values.numel() <= SLAB:
        return _sketch(values, numel, start, chunk)
    total = np.zeros(SUMS)
    # Slabs end where chunks end.
    first = SLAB - start % chunk
    for begin, slab in zip(
        [0, *range(first, values.numel(), SLAB)],
        (values[:first], *values[first:].split(SLAB)),
        strict=True,
    ):
        total += _sketch(slab, numel, start + begin, chunk)
    return total


def chunk_length(numel: int) -> int:
    """The elements of a chunk, a power of 2: 1 for small tensors, 1024 for large ones."""
    if numel < SHORTEST_CHUNK * CHUNKS:
        return 1
    return min(LONGEST_CHUNK, 1 << ((numel // CHUNKS).bit_length() - 1))


def _sketch(values: torch.Tensor, numel: int, start: int, chunk: int) -> np.ndarray:
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    count = values.numel()
    before = start % chunk
    after = -(before + count) % chunk
    if before or after:
        values = torch.nn.functional.pad(values, (before, after))
    first, chunks = start // chunk, (before + count + after) // chunk
    if chunk > 1:
        values = values.view(chunks, chunk) @ _place_signs(chunk, values.dtype)
    sums = values.numpy().astype(np.float64)
    buckets, signs = _chunks(numel <= SUMS, first, chunks)
    return np.bincount(buckets, weights=sums * signs, minlength=SUMS)


@functools.cache
def _place_signs(chunk: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(_signs(_mixed(np.arange(chunk), salt=1))).to(dtype)


@functools.lru_cache(maxsize=4096)
def _chunks(own_sketch: bool, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The sum to which each chunk belongs, and its sign."""
    numbers = np.arange(first, first + count)
    if own_sketch:
        return numbers, np.ones(count)
    mixed = _mixed(numbers, salt=2)
    return (mixed >> np.uint64(32)).astype(np.int64) % SUMS, _signs(mixed)


def _signs(mixed: np.ndarray) -> np.ndarray:
    return (mixed & np.uint64(1)).astype(np.float64) * 2 - 1


def _mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """64 random bits for each number: SplitMix64's output function (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = (numbers.astype(np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
