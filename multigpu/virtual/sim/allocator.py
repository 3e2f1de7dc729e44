"""CUDA's caching allocator: the segments that it takes from a GPU, and the chunks of them that
tensors get. What the driver has given, and tensors do not use, is reserved but unallocated.

The rules are those of PyTorch's c10/cuda/CUDACachingAllocator.cpp:
- A request is rounded up to 512 bytes. Each stream has a small pool, for requests up to 1 MiB,
  and a large one. A request takes the smallest free chunk of its pool that is large enough.
- If none is, a segment is taken: of 2 MiB for the small pool, of 20 MiB for requests below
  10 MiB, else of the request rounded up to 2 MiB. If the GPU has no room for it, the segments
  that no tensor uses are given back first.
- What remains of a chunk becomes a chunk of its own if it has 512 bytes in the small pool, or
  more than 1 MiB in the large one. Free neighbours become one chunk.
- With expandable_segments, a pool has one segment that grows by pages of 2 or 20 MiB.

Not simulated: a chunk that another stream uses (record_stream) is free as soon as its tensor
is; graphs and MemPool have no pools of their own; alloc_conf.py says which settings count. A
device reads them at its first allocation.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import RLock

from multigpu.virtual.sim import expandable
from multigpu.virtual.sim.alloc_conf import SMALL, UNIT, Settings, settings_text
from multigpu.virtual.sim.pools import FREE, UNMAPPED, USED, Chunk, Pool


@dataclass
class Count:
    """A counter of torch.cuda.memory_stats."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, change: int) -> None:
        self.current += change
        self.peak = max(self.peak, self.current)
        self.allocated += max(change, 0)
        self.freed -= min(change, 0)


class Allocator:
    """The caching allocator of one device.

    `obtain(n)` gets n bytes from the driver, or returns False; `first` is the address of the
    first segment, and `space` is how many addresses an expandable segment has.
    """

    def __init__(self, obtain: Callable[[int], bool], first: int, space: int):
        self.obtain = obtain
        self.next_address = first
        self.space = space
        self.settings: Settings | None = None
        self.pools: dict[tuple[int, bool], Pool] = {}
        # The first chunk of each segment.
        self.segments: dict[int, Chunk] = {}
        # Reserved bytes and segments: of the small pools, of the large ones, of all.
        self.reserved = {name: Count() for name in ("small_pool", "large_pool", "all")}
        self.num_segments = {name: Count() for name in self.reserved}
        # The most bytes reserved since the start.
        self.highest = 0
        self.num_retries = 0
        # Called with what happens, if the program records it (virtual/face/memory_history.py).
        self.record: Callable[..., None] | None = None
        self.lock = RLock()

    # The hot path: each allocation runs malloc and free, so both have few calls.
    def malloc(self, size: int, stream: int) -> Chunk | None:
        """A chunk of at least `size` bytes, a multiple of UNIT; None if it does not fit."""
        with self.lock:
            pool = self.pools.get((stream, size <= SMALL))
            if pool is None:
                pool = self._pool(size, stream)
            free = pool.free
            place = bisect_left(free, (size,))
            if place < len(free) and (pool.fine or self._suits(free[place][0], size)):
                if self.settings.expandable:
                    place = expandable.least_growing(free, place)
                chunk = free[place][2]
                del free[place]
            else:
                chunk = self._grow(pool, size)
                if chunk is None:
                    return None
            chunk.state = USED
            chunk.requested = size
            rest_size = chunk.size - size
            if rest_size >= pool.least_rest and size < pool.max_split:
                address = chunk.address + size
                rest = Chunk(address, rest_size, pool, FREE)
                rest.previous = chunk
                rest.next = after = chunk.next
                if after is not None:
                    after.previous = rest
                chunk.next = rest
                chunk.size = size
                insort(free, (rest_size, address, rest))
            if self.record is not None:
                self.record("alloc", chunk.address, size, stream)
            return chunk

    def free(self, chunk: Chunk) -> None:
        """Give a chunk back to its pool; the segment stays reserved."""
        with self.lock:
            if self.record is not None:
                for action in ("free_requested", "free_completed"):
                    self.record(action, chunk.address, chunk.requested, chunk.pool.stream)
            self.put(chunk)

    def put(self, chunk: Chunk) -> None:
        """Make a chunk free, one with its free neighbours."""
        free = chunk.pool.free
        left, right = chunk.previous, chunk.next
        if right is not None and right.state == FREE:
            del free[bisect_left(free, (right.size, right.address))]
            chunk.absorb_next()
        if left is not None and left.state == FREE:
            del free[bisect_left(free, (left.size, left.address))]
            left.absorb_next()
            chunk = left
        chunk.state = FREE
        insort(free, (chunk.size, chunk.address, chunk))

    def _pool(self, size: int, stream: int) -> Pool:
        """A new pool, of the stream and for requests of this size."""
        key = (stream, size <= SMALL)
        self.pools[key] = Pool(*key, self._read_settings())
        return self.pools[key]

    def _read_settings(self) -> Settings:
        if self.settings is None:
            self.settings = Settings.parse(settings_text())
        return self.settings

    def segment(self, size: int) -> int:
        """The bytes that the driver is asked for if no free chunk has `size` bytes."""
        return self._read_settings().segment(-(-size // UNIT) * UNIT)

    def _suits(self, free: int, size: int) -> bool:
        """Whether a request of `size` bytes may use a free chunk of `free` bytes.

        max_split_size_mb keeps the large chunks for large requests.
        """
        if size < self.settings.max_split:
            return free < self.settings.max_split
        return free < size + self.settings.max_rounding

    def _grow(self, pool: Pool, size: int) -> Chunk | None:
        """A chunk of new memory; gives unused segments back first if there is no room."""
        take = self._add_segment
        if self.settings.expandable:
            take = partial(expandable.expand, self)
        chunk = take(pool, size)
        if chunk is None and self._release_oversize(pool, size):
            chunk = take(pool, size)
        if chunk is None:
            self.release()
            self.num_retries += 1
            chunk = take(pool, size)
        return chunk

    def _add_segment(self, pool: Pool, size: int) -> Chunk | None:
        nbytes = self.settings.segment(size)
        if not self.obtain(nbytes):
            return None
        chunk = Chunk(self.next_address, nbytes, pool)
        self.next_address += nbytes
        self.segments[chunk.address] = chunk
        self.count("segment_alloc", chunk, nbytes)
        return chunk

    def count(self, action: str, chunk: Chunk, change: int) -> None:
        """Count reserved bytes, and a segment if `action` makes or ends one."""
        for name in ("small_pool" if chunk.pool.small else "large_pool", "all"):
            self.reserved[name].add(change)
            if action in ("segment_alloc", "segment_free"):
                self.num_segments[name].add(1 if change > 0 else -1)
        self.highest = max(self.highest, self.reserved["all"].current)
        if self.record is not None:
            self.record(action, chunk.address, abs(change), chunk.pool.stream)

    def release(self) -> None:
        """Give the memory of free chunks back: of whole segments, or of whole pages."""
        with self.lock:
            for pool in sorted(self.pools.values(), key=lambda pool: pool.small):
                for _, _, chunk in list(pool.free):
                    if self.settings.expandable:
                        expandable.unmap(self, chunk)
                    else:
                        self._release_segment(chunk)

    def _release_segment(self, chunk: Chunk) -> None:
        """Give a segment back if its free chunk is all of it."""
        if chunk.previous is None and chunk.next is None:
            chunk.pool.remove(chunk)
            del self.segments[chunk.address]
            self.count("segment_free", chunk, -chunk.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give chunks above max_split_size_mb back; return whether that makes room enough."""
        least = max(size, self.settings.max_split)
        if least == math.inf:
            return False
        free = pool.free
        place = bisect_left(free, (least,))
        if place < len(free):
            self._release_segment(free[place][2])
            return True
        released = 0
        while free and released < least and free[-1][0] >= self.settings.max_split:
            released += free[-1][0]
            self._release_segment(free[-1][2])
        return released >= least

    # ---- what programs read ----------------------------------------------------------------

    def inactive(self, small: bool | None = None) -> tuple[int, int]:
        """(number, bytes) of free chunks that are parts of segments in use; of both pools."""
        with self.lock:
            sizes = [
                size
                for pool in self.pools.values()
                for size, _, chunk in pool.free
                if small in (None, pool.small)
                and not self.settings.expandable
                and (chunk.previous or chunk.next)
            ]
        return len(sizes), sum(sizes)

    def ranges(self) -> Iterator[list[Chunk]]:
        """The chunks of each contiguous range of memory, in the order of their addresses."""
        for _, first in sorted(self.segments.items()):
            chunks: list[Chunk] = []
            chunk: Chunk | None = first
            while chunk is not None:
                if chunk.state != UNMAPPED:
                    chunks.append(chunk)
                elif chunks:
                    yield chunks
                    chunks = []
                chunk = chunk.next
            if chunks:
                yield chunks

    def reset_peak(self) -> None:
        """Let the peaks of what is reserved be what is reserved now."""
        for count in (*self.reserved.values(), *self.num_segments.values()):
            count.peak = count.current
