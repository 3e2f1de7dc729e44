"""The chunks of memory that a caching allocator hands out, and the pools of free ones."""

import math
from bisect import bisect_left, insort

from multigpu.virtual.sim.alloc_conf import SMALL, SMALL_SEGMENT, UNIT, Settings

FREE, USED, UNMAPPED = range(3)


class Chunk:
    """A part of a segment: free, used by a tensor, or (if expandable) without memory yet."""

    __slots__ = ("address", "next", "pool", "previous", "requested", "size", "state")

    def __init__(self, address: int, size: int, pool: "Pool", state: int = USED):
        self.address = address
        self.size = size
        self.pool = pool
        self.state = state
        self.requested = 0
        self.previous: Chunk | None = None
        self.next: Chunk | None = None

    def split(self, size: int, state: int) -> "Chunk":
        """Keep `size` bytes, and return the rest as a chunk with this state."""
        rest = Chunk(self.address + size, self.size - size, self.pool, state)
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Make this chunk and the next one a single chunk."""
        gone = self.next
        self.size += gone.size
        self.next = gone.next
        if self.next is not None:
            self.next.previous = self


class Pool:
    """The chunks of one stream, for small or for large requests.

    `free` has (size, address, chunk) in this order, `unmapped` (address, chunk). The rest of a
    chunk is split off if it has at least `least_rest` bytes and the request less than
    `max_split`.
    """

    def __init__(self, stream: int, small: bool, settings: Settings):
        self.stream = stream
        self.small = small
        self.page = SMALL_SEGMENT if small else settings.large_segment
        self.fine = small or settings.expandable
        self.least_rest = UNIT if self.fine else SMALL + 1
        self.max_split = math.inf if self.fine else settings.max_split
        self.free: list[tuple[int, int, Chunk]] = []
        self.unmapped: list[tuple[int, Chunk]] = []

    def add(self, chunk: Chunk) -> None:
        insort(self.free, (chunk.size, chunk.address, chunk))

    def remove(self, chunk: Chunk) -> None:
        del self.free[bisect_left(self.free, (chunk.size, chunk.address))]

    def add_unmapped(self, chunk: Chunk) -> None:
        """Take the memory of a chunk away, and join it with its unmapped neighbours."""
        chunk.state = UNMAPPED
        left, right = chunk.previous, chunk.next
        if right is not None and right.state == UNMAPPED:
            self.unmapped.remove((right.address, right))
            chunk.absorb_next()
        if left is not None and left.state == UNMAPPED:
            left.absorb_next()
        else:
            insort(self.unmapped, (chunk.address, chunk))
