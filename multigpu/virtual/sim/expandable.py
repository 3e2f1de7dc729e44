"""Expandable segments: a pool has one segment, which gets memory by whole pages.

A segment has addresses for more than the GPU's memory. Its chunks that have no memory yet are
unmapped. Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp (try_allocate_expandable_block,
map_block and unmap_block).
"""

from typing import TYPE_CHECKING

from multigpu.virtual.sim.pools import FREE, UNMAPPED, USED, Chunk, Pool

if TYPE_CHECKING:
    from multigpu.virtual.sim.allocator import Allocator


def expand(allocator: "Allocator", pool: Pool, size: int) -> Chunk | None:
    """A chunk of `size` bytes or more at the lowest address that pages can be added to.

    None if the driver has too little memory left.
    """
    chunk = next(filter(None, (_start(part, size) for _, part in pool.unmapped)), None)
    if chunk is None:
        start = -(-allocator.next_address // pool.page) * pool.page
        chunk = Chunk(start, -(-allocator.space // pool.page) * pool.page, pool)
        allocator.next_address = start + chunk.size
        allocator.segments[start] = chunk
        pool.add_unmapped(chunk)
    while chunk.state == UNMAPPED or chunk.size < size:
        unmapped = chunk if chunk.state == UNMAPPED else chunk.next
        missing = size - (0 if chunk is unmapped else chunk.size)
        chunk = _map(allocator, unmapped, min(missing, unmapped.size))
        if chunk is None:
            return None
    pool.remove(chunk)
    return chunk


def _map(allocator: "Allocator", chunk: Chunk, size: int) -> Chunk | None:
    """Add pages for `size` bytes to the start of an unmapped chunk; return its free chunk.

    None if the driver has too little memory left.
    """
    pool = chunk.pool
    size = -(-size // pool.page) * pool.page
    if not allocator.obtain(size):
        return None
    pool.unmapped.remove((chunk.address, chunk))
    allocator.count("segment_map", chunk, size)
    if size < chunk.size:
        # The chunk is no longer unmapped, so the rest stays apart.
        chunk.state = USED
        pool.add_unmapped(chunk.split(size, UNMAPPED))
    left = chunk.previous
    allocator.put(chunk)
    return left if left is not None and left.state == FREE else chunk


def unmap(allocator: "Allocator", chunk: Chunk) -> None:
    """Give the pages back that are whole in a free chunk."""
    pool = chunk.pool
    start = -(-chunk.address // pool.page) * pool.page
    end = (chunk.address + chunk.size) // pool.page * pool.page
    if start >= end:
        return
    pool.remove(chunk)
    if chunk.address + chunk.size > end:
        pool.add(chunk.split(end - chunk.address, FREE))
    if chunk.address < start:
        pages = chunk.split(start - chunk.address, UNMAPPED)
        pool.add(chunk)
        chunk = pages
    allocator.count("segment_unmap", chunk, start - end)
    pool.add_unmapped(chunk)


def _start(chunk: Chunk, size: int) -> Chunk | None:
    """Where `size` bytes begin that no tensor has, and that reach into an unmapped chunk."""
    if chunk.previous is not None and chunk.previous.state == FREE:
        chunk = chunk.previous
    room, part = 0, chunk
    while part is not None and part.state != USED and room < size:
        room += part.size
        part = part.next
    return chunk if room >= size else None


def least_growing(free: list[tuple[int, int, Chunk]], place: int) -> int:
    """The place of the free chunk to use in an expandable segment.

    A chunk that can grow counts with the size that it can grow to.
    """

    def reach(place: int) -> int:
        size, _, chunk = free[place]
        grows = chunk.next is not None and chunk.next.state == UNMAPPED
        return size + (chunk.next.size if grows else 0)

    while place + 1 < len(free) and reach(place + 1) < reach(place):
        place += 1
    return place
