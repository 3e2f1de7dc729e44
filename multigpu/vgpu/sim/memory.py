"""How much memory does a device hold? A meter a device, and a block for each storage that lies on it.

Tensors that share a storage share a block. When the last of them is gone the block's memory is given back at once:
CPython counts references, and a tensor that autograd has saved keeps its Python half, so its block, alive.
"""

import ctypes
import weakref
from collections import deque

import torch

UNIT = 512  # CUDA's caching allocator rounds every request up to 512 bytes (c10/cuda/CUDACachingAllocator.h, kMinBlockSize)
LARGE = 64 * 2**20  # from here on the host is asked whether it has the memory


class Meter:
    """The memory of one device, in bytes. `machine` is the running set of devices that it belongs to."""

    def __init__(self, machine: object, index: int, capacity: int):
        self.machine, self.index, self.capacity = machine, index, capacity
        self.device = torch.device("vgpu", index)
        self.peak = self._allocated = 0
        self._held: set[Held] = set()
        self._freed: deque[Held] = deque()
        self.made = 0  # how many storages so far
        self.alive = True  # False after vgpu.stop()

    @property
    def allocated(self) -> int:
        self._give_back()
        return self._allocated

    def hold(self, block: "Block", nbytes: int) -> "Held":
        """Take `nbytes` for as long as `block` lives."""
        self.take(nbytes)
        held = Held(block, self._freed.append)
        held.nbytes = nbytes
        self._held.add(held)
        return held

    def _give_back(self) -> None:
        while self._freed:
            try:
                held = self._freed.popleft()
            except IndexError:  # another thread was faster
                return
            self._held.discard(held)
            self._allocated -= held.nbytes

    def check(self, nbytes: int) -> None:
        """Raises torch.OutOfMemoryError if `nbytes` more bytes do not fit on the device, or not on the host."""
        if self.allocated + nbytes > self.capacity:
            free = self.capacity - self.allocated
            raise torch.OutOfMemoryError(
                f"vgpu out of memory. Tried to allocate {readable(nbytes)}. GPU {self.index} has a total capacity of "
                f"{readable(self.capacity)} of which {readable(free)} is free. Of the allocated memory "
                f"{readable(self.allocated)} is allocated by PyTorch."
            )

    def check_host(self, nbytes: int) -> None:
        """Before a large tensor is made: raises torch.OutOfMemoryError if the host, where the numbers live, has no room."""
        if nbytes >= LARGE and self.machine.compute and nbytes > (available := host_memory()):
            raise torch.OutOfMemoryError(
                f"The host is out of memory. Tried to allocate {readable(nbytes)} on vgpu:{self.index}, whose numbers "
                f"live in the host's memory, and of that {readable(available)} is available. Use smaller tensors, or "
                f"vgpu.start(compute=False), which needs none."
            )

    def take(self, nbytes: int) -> None:
        if self._freed:
            self._give_back()
        allocated = self._allocated + nbytes
        if allocated > self.capacity:
            self.check(nbytes)
        # No lock: CPython changes threads only at calls and jumps, and there is none between this read and write.
        self._allocated = allocated
        self.made += 1
        if allocated > self.peak:
            self.peak = allocated


class Held(weakref.ref):
    """A block's bytes. When the block is gone they wait in the meter's deque until somebody asks.

    Not in a __del__: a Ctrl-C that fell into it would be lost, since Python drops what is raised there. Here no line of
    Python runs.
    """

    __slots__ = ("nbytes",)


class Block:
    """One storage on a device. `key` is the storage's identity, which is its own as long as the block lives."""

    __slots__ = ("__weakref__", "held", "key", "meter")

    def __init__(self, meter: Meter, key: int, nbytes: int):
        self.meter, self.key = meter, key
        self.held = meter.hold(self, -(-nbytes // UNIT) * UNIT)

    def resize(self, nbytes: int) -> None:
        """An in-place operation has made the storage larger or smaller."""
        more = -(-nbytes // UNIT) * UNIT - self.held.nbytes
        if more:
            self.meter.take(more)
            self.held.nbytes += more


def keep_freed_memory() -> None:
    """Tell the host's allocator to keep up to 256 MiB of freed memory for the next tensors, as CUDA's caching one does.

    glibc otherwise gives the large blocks of a step back to the system and gets them anew in the next, and the pages
    of new blocks have to be zeroed: a fifth of a small training step. Other C libraries are left as they are. glibc
    has no way back, so this stays after vgpu.stop.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = (
            -1,
            -3,
        )  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
        mallopt(trim_threshold, 256 * 2**20)
        mallopt(mmap_threshold, 32 * 2**20)  # the largest that glibc takes


def readable(nbytes: float) -> str:
    """Bytes as CUDA's messages write them: 64.00 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def host_memory() -> int:
    """Bytes that the host can still give without swapping; what Linux says, elsewhere no limit."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**63
