"""The memory of the devices: a meter for each device, and a block for each storage on it.

Tensors that share a storage share a block. When the last of them is deleted, the block's
memory is free at once, because CPython counts references. A tensor that autograd has saved
keeps its Python object alive, and so its block.
"""

import ctypes
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from multigpu.vgpu.sim.machine import Machine

# Bytes. CUDA's caching allocator rounds every request up to a multiple of 512
# (c10/cuda/CUDACachingAllocator.h, kMinBlockSize).
UNIT = 512
# Bytes. The host's free memory is read only for requests of at least this size, because
# reading it takes time.
LARGE = 64 * 2**20


class Meter:
    """The memory of one device of `machine`, in bytes."""

    def __init__(self, machine: "Machine", index: int, capacity: int):
        self.machine = machine
        self.index = index
        self.capacity = capacity
        self.device = torch.device("vgpu", index)
        self.peak = 0
        self._allocated = 0
        # A weak reference whose object is deleted calls its callback only if the reference
        # itself still exists, so all are kept here.
        self._allocations: set[Allocation] = set()
        self._freed: deque[Allocation] = deque()
        # The number of allocations so far.
        self.num_allocations = 0
        # False after vgpu.stop(), and in a forked child.
        self.alive = True

    @property
    def allocated(self) -> int:
        """Bytes allocated now."""
        self._collect_freed()
        return self._allocated

    def allocate(self, block: "Block", nbytes: int) -> "Allocation":
        """Allocate `nbytes` bytes until `block` is deleted.

        Raises torch.OutOfMemoryError if they do not fit.
        """
        self.reserve(nbytes)
        allocation = Allocation(block, self._freed.append)
        allocation.nbytes = nbytes
        self._allocations.add(allocation)
        return allocation

    def _collect_freed(self) -> None:
        while self._freed:
            try:
                allocation = self._freed.popleft()
            except IndexError:
                # Another thread has emptied the deque.
                return
            self._allocations.discard(allocation)
            self._allocated -= allocation.nbytes

    def check_capacity(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if `nbytes` more bytes do not fit on the device."""
        if self.allocated + nbytes > self.capacity:
            free = self.capacity - self.allocated
            # CUDA's wording.
            raise torch.OutOfMemoryError(
                f"vgpu out of memory. Tried to allocate {format_bytes(nbytes)}. "
                f"GPU {self.index} has a total capacity of {format_bytes(self.capacity)} "
                f"of which {format_bytes(free)} is free. Of the allocated memory "
                f"{format_bytes(self.allocated)} is allocated by PyTorch."
            )

    def check_host(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if the host has no room for a payload of `nbytes`.

        Call this before the payload is made. Payloads smaller than LARGE are not checked.
        """
        if nbytes < LARGE or not self.machine.compute:
            return
        available = host_memory()
        if nbytes > available:
            raise torch.OutOfMemoryError(
                f"The host is out of memory. Tried to allocate {format_bytes(nbytes)} on "
                f"vgpu:{self.index}, which keeps its numbers in the host's memory, but only "
                f"{format_bytes(available)} is available. Use smaller tensors, or "
                f"vgpu.start(compute=False)."
            )

    def reserve(self, nbytes: int) -> None:
        """Count `nbytes` more bytes; raise torch.OutOfMemoryError if they do not fit."""
        if self._freed:
            self._collect_freed()
        allocated = self._allocated + nbytes
        if allocated > self.capacity:
            self.check_capacity(nbytes)
        # No lock: CPython switches threads only at calls and at jumps back (loops). If the
        # bytes fit, neither of them comes between the read above and this write.
        self._allocated = allocated
        self.num_allocations += 1
        if allocated > self.peak:
            self.peak = allocated


class Allocation(weakref.ref):
    """The `nbytes` bytes of a block. When the block is deleted, its meter's deque gets this.

    Block has no __del__ method, because Python ignores an exception that is raised there: a
    Ctrl-C at that moment would be lost. A weak reference with a callback in C executes no
    Python code.
    """

    __slots__ = ("nbytes",)


class Block:
    """One storage on a device. `key` is the storage's id, unique while the block exists."""

    __slots__ = ("__weakref__", "allocation", "key", "meter")

    def __init__(self, meter: Meter, key: int, nbytes: int):
        self.meter = meter
        self.key = key
        self.allocation = meter.allocate(self, -(-nbytes // UNIT) * UNIT)

    def resize(self, nbytes: int) -> None:
        """Set the block's size to `nbytes`, after an in-place operation resized the storage.

        Raises torch.OutOfMemoryError if the new size does not fit.
        """
        more = -(-nbytes // UNIT) * UNIT - self.allocation.nbytes
        if more:
            self.meter.reserve(more)
            self.allocation.nbytes += more


def keep_freed_memory() -> None:
    """Let the host's allocator keep up to 256 MiB of freed memory, as CUDA's allocator does.

    By default glibc returns the large blocks of a step to the system and requests them again
    in the next step. The system then has to zero their pages, which takes a fifth of a small
    training step. C libraries without mallopt are left unchanged. glibc cannot undo this
    setting, so it stays after vgpu.stop.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # From malloc.h.
    m_trim_threshold = -1
    m_mmap_threshold = -3
    mallopt(m_trim_threshold, 256 * 2**20)
    # The largest value that glibc accepts.
    mallopt(m_mmap_threshold, 32 * 2**20)


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes as CUDA's messages do: "64.00 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def host_memory() -> int:
    """Bytes that the host can allocate without swapping; 2**63 if the host is not Linux."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**63
