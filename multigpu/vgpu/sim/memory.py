"""The memory of the devices: a meter for each device, and a block for each storage on it.

Tensors that share a storage share a block. When the last of them is deleted, the block's
memory is free at once: CPython counts references, and a tensor that autograd has saved keeps
its Python object, and so its block, alive.
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
# Bytes. For a request of at least this size the host's free memory is read, which takes time.
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
        # A weak reference reports the end of its block only while it is alive itself.
        self._allocations: set[Allocation] = set()
        self._freed: deque[Allocation] = deque()
        # How many allocations there have been.
        self.num_allocations = 0
        # False after vgpu.stop().
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
            # CUDA's sentences.
            raise torch.OutOfMemoryError(
                f"vgpu out of memory. Tried to allocate {format_bytes(nbytes)}. "
                f"GPU {self.index} has a total capacity of {format_bytes(self.capacity)} "
                f"of which {format_bytes(free)} is free. Of the allocated memory "
                f"{format_bytes(self.allocated)} is allocated by PyTorch."
            )

    def check_host(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if the host has no room for a payload of `nbytes`.

        To be called before the payload is made. Small payloads are not checked.
        """
        if nbytes < LARGE or not self.machine.compute:
            return
        available = host_memory()
        if nbytes > available:
            raise torch.OutOfMemoryError(
                f"The host is out of memory. Tried to allocate {format_bytes(nbytes)} on "
                f"vgpu:{self.index}, whose numbers are in the host's memory, of which "
                f"{format_bytes(available)} is available. Use smaller tensors, or "
                f"vgpu.start(compute=False)."
            )

    def reserve(self, nbytes: int) -> None:
        """Add `nbytes` bytes; raise torch.OutOfMemoryError if they do not fit."""
        if self._freed:
            self._collect_freed()
        allocated = self._allocated + nbytes
        if allocated > self.capacity:
            self.check_capacity(nbytes)
        # No lock: CPython switches threads only at calls and jumps, and there is none between
        # this read and write.
        self._allocated = allocated
        self.num_allocations += 1
        if allocated > self.peak:
            self.peak = allocated


class Allocation(weakref.ref):
    """The `nbytes` bytes of a block; when the block is deleted, its meter's deque gets them.

    This is no __del__ method: Python drops an exception that is raised there, so a Ctrl-C at
    that moment would be lost. A weak reference with a C callback executes no Python code.
    """

    __slots__ = ("nbytes",)


class Block:
    """One storage on a device. `key` is the storage's id, unique while the block lives."""

    __slots__ = ("__weakref__", "allocation", "key", "meter")

    def __init__(self, meter: Meter, key: int, nbytes: int):
        self.meter = meter
        self.key = key
        self.allocation = meter.allocate(self, -(-nbytes // UNIT) * UNIT)

    def resize(self, nbytes: int) -> None:
        """Set the storage's size to `nbytes` bytes, as an in-place operation has done.

        Raises torch.OutOfMemoryError if it does not fit.
        """
        more = -(-nbytes // UNIT) * UNIT - self.allocation.nbytes
        if more:
            self.meter.reserve(more)
            self.allocation.nbytes += more


def keep_freed_memory() -> None:
    """Let the host's allocator keep up to 256 MiB of freed memory, as CUDA's caching one does.

    By default glibc returns the large blocks of a step to the system and requests them again
    in the next, and the system has to zero their pages: a fifth of a small training step.
    Other C libraries are left as they are. glibc cannot undo this, so it stays after
    vgpu.stop.
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
    """Bytes that the host can allocate without swapping; no limit if it is not Linux."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**63
