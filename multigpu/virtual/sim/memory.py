"""The memory of the devices: a meter for each device, and a block for each storage on it.

Tensors that share a storage share a block. When the last of them is deleted, the block's
memory is free at once, because CPython counts references. A tensor that autograd has saved
keeps its Python object alive, and so its block.
"""

import ctypes
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from multigpu.launch.room import available_memory
from multigpu.virtual.sim import contents, names
from multigpu.virtual.sim.allocator import Allocator, Chunk
from multigpu.virtual.sim.host_thread import NO_BACKWARD
from multigpu.virtual.sim.presets import Gpu, format_bytes
from multigpu.virtual.sim.workspace import workspace_bytes

if TYPE_CHECKING:
    from multigpu.virtual.shared_memory import SharedMemory
    from multigpu.virtual.sim.cost import Costs
    from multigpu.virtual.sim.machine import Machine

# Bytes. CUDA's caching allocator rounds every request up to a multiple of 512
# (c10/cuda/CUDACachingAllocator.h, kMinBlockSize).
UNIT = 512
# Bytes. The host's free memory is read only for requests of at least this size, because
# reading it takes time.
LARGE = 64 * 2**20
_graph_task = torch._C._current_graph_task_id
# What a meter counts since the start, or since a program has reset it.
ACCUMULATED = ("bytes allocated", "bytes freed", "allocations", "frees")


class Meter:
    """One device of `machine`: its model `gpu`, and its memory, in bytes.

    `costs` are the times of its operations. `device` is the device as programs see it, and
    `inner_device` the same for torch's C++ code.
    """

    costs: "Costs"

    def __init__(self, machine: "Machine", index: int, gpu: Gpu, capacity: int):
        self.machine = machine
        self.index = index
        self.gpu = gpu
        # Its number on the machine: another one if CUDA_VISIBLE_DEVICES hides GPUs.
        self.number = index
        self.capacity = capacity
        self.inner_device = torch.device(names.INNER, index)
        self.device = names.show(self.inner_device)
        # The part of the capacity that this process may use, in bytes.
        self.limit = capacity
        # What the processes of a run share (virtual/shared_memory.py).
        self.shared: SharedMemory | None = None
        # The most bytes since reset_peak, and since the start.
        self.peak = 0
        self.highest = 0
        self._allocated = 0
        # With more bytes than this, the host's memory is looked at again.
        self._growth_checked_at = LARGE
        # A weak reference whose object is deleted calls its callback only if the reference
        # itself still exists, so all are kept here.
        self._allocations: set[Allocation] = set()
        self._freed: deque[Allocation] = deque()
        # The number of allocations so far.
        self.num_allocations = 0
        # The number of requests that did not fit.
        self.num_ooms = 0
        # Bytes that were freed so far.
        self._freed_bytes = 0
        # accumulated() at the last reset_accumulated.
        self._before_reset = dict.fromkeys(ACCUMULATED, 0)
        # The ids of the blocks whose storages a program has made smaller, as FSDP does. Some
        # can be of blocks that no longer exist.
        self.shrunk: set[int] = set()
        # cuBLAS's workspaces, by (whether in backward, the stream's number); see workspace.py.
        # Backward stands for autograd's thread.
        self.has_workspaces = names.shown_type() != names.INNER
        self.workspaces: dict[tuple[bool, int], Block] = {}
        # The address that the next block gets: each device has 2**52 addresses of its own.
        self.next_address = (index + 1) << 52
        # Programs that see CUDA have its caching allocator, and learn what fills the memory.
        self.allocator: Allocator | None = None
        self.contents: contents.Contents | None = None
        if self.has_workspaces:
            # PyTorch reserves 9/8 of the memory as an expandable segment's addresses.
            self.allocator = Allocator(self.obtain, self.next_address, capacity // 8 * 9)
            self.contents = contents.Contents()
        # False after stop(), in a forked child, and when the host has noticed an assert.
        self.alive = True
        # Whether a kernel has asserted (ops/device_asserts.py), and whether its launch waits.
        self.asserted = False
        self.launch_blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"

    def assert_error(self) -> torch.AcceleratorError:
        """CUDA's error for a kernel that has asserted. From now on the device is lost."""
        self.alive = False
        asynchronous = (
            "CUDA kernel errors might be asynchronously reported at some other API call, so "
            "the stacktrace below might be incorrect.\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        )
        error = torch.AcceleratorError(
            "CUDA error: device-side assert triggered\n"
            "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
            "group__CUDART__TYPES.html for more information.\n"
            f"{'' if self.launch_blocking else asynchronous}"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        )
        error.error_code = 710
        return error

    def check_assert(self) -> None:
        """Raise CUDA's error if a kernel has asserted."""
        if self.asserted:
            raise self.assert_error()

    @property
    def allocated(self) -> int:
        """Bytes allocated now."""
        self._collect_freed()
        return self._allocated

    @property
    def reserved(self) -> int:
        """Bytes that the process has of the device now, with those kept for later tensors."""
        allocated = self.allocated
        return allocated if self.allocator is None else self.allocator.reserved["all"].current

    @property
    def highest_reserved(self) -> int:
        """The most bytes reserved since the start."""
        return self.highest if self.allocator is None else self.allocator.highest

    def processes(self) -> list[tuple[int, int]]:
        """The number of each process that has memory of the device, and its bytes."""
        processes = [(self.machine.process, self.reserved)]
        if self.shared is not None:
            processes += self.shared.others()
        return sorted(processes)

    @property
    def free(self) -> int:
        """Bytes of the device that no process has."""
        return self.capacity - sum(nbytes for _, nbytes in self.processes())

    def room(self) -> int:
        """Bytes that the driver can still give this process."""
        return min(self.limit - self.reserved, self.free)

    def obtain(self, nbytes: int) -> bool:
        """Get `nbytes` bytes from the driver; False if it has no room."""
        reserved = self.allocator.reserved["all"].current + nbytes
        if reserved > self.limit:
            return False
        return self.shared is None or self.shared.occupy(reserved)

    def give_back(self) -> None:
        """Leave what the allocator has released to the device's other processes."""
        if self.shared is not None:
            self.shared.occupy(self.reserved)

    def reset_peak(self) -> None:
        """Let `peak` be the most bytes allocated from now on."""
        self.peak = self.allocated
        if self.allocator is not None:
            self.allocator.reset_peak()

    def accumulated(self) -> dict[str, int]:
        """What was allocated and freed since the start, or since reset_accumulated."""
        return {
            name: total - self._before_reset[name] for name, total in self._totals().items()
        }

    def reset_accumulated(self) -> None:
        """Let `accumulated` begin at zero."""
        self._before_reset = self._totals()

    def _totals(self) -> dict[str, int]:
        nbytes, num_live = self.allocated, len(self._allocations)
        freed = (self._freed_bytes, self.num_allocations - num_live)
        totals = (nbytes + freed[0], freed[0], self.num_allocations, freed[1])
        return dict(zip(ACCUMULATED, totals, strict=True))

    def living(self) -> "list[Allocation]":
        """The allocations that exist now."""
        self._collect_freed()
        return list(self._allocations)

    def allocate(self, block: "Block", nbytes: int) -> "Allocation":
        """Allocate `nbytes` bytes until `block` is deleted.

        Raises torch.OutOfMemoryError if they do not fit.
        """
        chunk = self.reserve(nbytes, nbytes)
        allocation = Allocation(block, self._freed.append)
        allocation.nbytes = nbytes
        allocation.chunk = chunk
        if self.contents is not None:
            allocation.born = self.num_allocations
            if self.machine.clock.updating or _graph_task() != NO_BACKWARD:
                allocation.kind = contents.TEMPORARIES
            else:
                allocation.kind = contents.ACTIVATIONS
            is_large = nbytes >= contents.LEAST_WITH_LINE
            allocation.line = contents.program_line(sys._getframe(1)) if is_large else None
            if self.contents.history is not None:
                allocation.since = self._time()
        self._allocations.add(allocation)
        return allocation

    def resize(self, allocation: "Allocation", nbytes: int) -> None:
        """Give an allocation `nbytes` bytes, at another address.

        Raises torch.OutOfMemoryError if they do not fit.
        """
        old, before = allocation.chunk, allocation.nbytes
        allocation.chunk = self.reserve(nbytes - before, nbytes)
        if self.contents is not None:
            if allocation.born <= self.contents.born:
                self.contents.forget(allocation)
            allocation.born = self.num_allocations
            if self.contents.history is not None:
                self._note_end(allocation)
        allocation.nbytes = nbytes
        if old is not None:
            self.allocator.free(old)

    def add_workspace(self, key: tuple[bool, int]) -> None:
        """Allocate a workspace of cuBLAS. Raises torch.OutOfMemoryError if it does not fit."""
        block = Block(self, -1, workspace_bytes(self.gpu.capability))
        block.mark(contents.WORKSPACES)
        self.workspaces[key] = block

    def use_briefly(self, nbytes: int) -> None:
        """Allocate `nbytes` bytes and free them: what a kernel needs while it runs."""
        nbytes = -(-nbytes // UNIT) * UNIT
        chunk = self.reserve(nbytes, nbytes)
        self._allocated -= nbytes
        self._freed_bytes += nbytes
        if chunk is not None:
            self.allocator.free(chunk)
            self.contents.add_brief(self.num_allocations, nbytes)

    def _collect_freed(self) -> None:
        """Take the blocks that were deleted since the last call off the account."""
        while self._freed:
            try:
                allocation = self._freed.popleft()
            except IndexError:
                # Another thread has emptied the deque.
                return
            self._allocations.discard(allocation)
            self._allocated -= allocation.nbytes
            self._freed_bytes += allocation.nbytes
            if allocation.chunk is not None:
                if allocation.born <= self.contents.born:
                    self.contents.forget(allocation)
                if self.contents.history is not None:
                    self._note_end(allocation)
                self.allocator.free(allocation.chunk)

    def _time(self) -> float:
        """When the device has done what was launched so far."""
        return self.machine.clock.busy_until(self.index)

    def _note_end(self, allocation: "Allocation") -> None:
        """Note, for the memory over time, that an allocation ends or gets another size."""
        now = self._time()
        self.contents.history.append(allocation.lifetime(now))
        allocation.since = now

    def history(self) -> list[tuple[float, float, int, str]]:
        """(from, until, bytes, kind) of each allocation so far; what exists ends now."""
        living, now = self.living(), self._time()
        ended = self.contents.history or []
        return [*ended, *(allocation.lifetime(now) for allocation in living)]

    def check_capacity(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if `nbytes` more bytes do not fit on the device."""
        if self.allocated + nbytes > self.limit:
            if self.allocator is not None:
                self.allocator.release()
            raise self._out_of_memory(nbytes)

    def _out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        """CUDA's error for a request of `nbytes` bytes, whose figures are noted."""
        self.num_ooms += 1
        unallocated = "."
        if self.allocator is not None:
            # The driver is asked for a segment.
            nbytes = self.allocator.segment(nbytes)
            self.give_back()
            self._note_full(nbytes)
            if self.allocator.record is not None:
                self.allocator.record("oom", self.free, nbytes, 0)
            unallocated = (
                f", and {format_bytes(self.reserved - self.allocated)} is reserved by PyTorch "
                f"but unallocated. If reserved but unallocated memory is large try setting "
                f"PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
                f"documentation for Memory Management  (https://pytorch.org/docs/stable/notes/"
                f"cuda.html#environment-variables)"
            )
        processes = self.processes()
        free = self.capacity - sum(number for _, number in processes)
        in_use = ""
        if names.shown_type() != names.INNER:
            # This process is the last one.
            processes.sort(key=lambda process: process[0] == self.machine.process)
            in_use = "".join(map(self._in_use, processes))
        allowed = ""
        if self.limit < self.capacity:
            allowed = f"{format_bytes(self.limit)} allowed; "
        # CUDA's wording.
        return torch.OutOfMemoryError(
            f"{names.runtime()} out of memory. Tried to allocate {format_bytes(nbytes)}. "
            f"GPU {self.index} has a total capacity of {format_bytes(self.capacity)} "
            f"of which {format_bytes(free)} is free. {in_use}{allowed}"
            f"Of the allocated memory {format_bytes(self.allocated)} is allocated by PyTorch"
            f"{unallocated}"
        )

    def _note_full(self, nbytes: int) -> None:
        """Note what exists while the driver has too little for `nbytes` bytes."""
        self.contents.full = [(allocation.nbytes, allocation) for allocation in self.living()]
        self.contents.shortage = contents.Shortage(
            tried=nbytes,
            missing=nbytes - self.room(),
            allocated=self._allocated,
            reserved=self.reserved,
            born=self.num_allocations,
        )
        if on_out_of_memory is not None:
            on_out_of_memory()

    def _in_use(self, process: tuple[int, int]) -> str:
        """CUDA's sentence about the memory of a process."""
        number, nbytes = process
        is_this = number == self.machine.process
        who = "Including non-PyTorch memory, this process" if is_this else f"Process {number}"
        return f"{who} has {format_bytes(nbytes)} memory in use. "

    def check_host(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if the host has no room for a payload of `nbytes`.

        Call this before the payload is made. Payloads smaller than LARGE are not checked.
        """
        if nbytes < LARGE or not self.machine.compute:
            return
        available = host_memory()
        if nbytes > available:
            raise self._host_is_full(nbytes, available)

    def _host_is_full(self, nbytes: int, available: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"The host is out of memory. Tried to allocate {format_bytes(nbytes)} on "
            f"{self.device}, which keeps its numbers in the host's memory, but only "
            f"{format_bytes(available)} is available. Use smaller tensors, or "
            f"{names.option('compute=False', '--shapes-only', 'shapes_only=True')}."
        )

    def _check_growth(self, nbytes: int) -> None:
        """Raise torch.OutOfMemoryError if the host has less than LARGE bytes left.

        Small payloads fill the host too: this is called after each LARGE bytes of them.
        """
        self._growth_checked_at = self._allocated + nbytes + LARGE
        if self.machine.compute and (available := host_memory()) < LARGE:
            self._growth_checked_at = 0
            raise self._host_is_full(nbytes, available)

    def reserve(self, nbytes: int, size: int) -> Chunk | None:
        """Count `nbytes` more bytes, and return the allocator's chunk of `size` bytes, if any.

        Raises torch.OutOfMemoryError if they do not fit.
        """
        if self._freed:
            self._collect_freed()
        if self._allocated + nbytes > self._growth_checked_at:
            self._check_growth(nbytes)
        chunk = None
        if self.allocator is not None and size:
            # As for cuBLAS's workspaces, the main thread's stream stands for other threads'.
            stream = self.machine.clock.main_thread.streams[self.index].number
            chunk = self.allocator.malloc(size, stream)
            if chunk is None:
                raise self._out_of_memory(size)
        allocated = self._allocated + nbytes
        if chunk is None and allocated > self.limit:
            self.check_capacity(nbytes)
        # No lock: CPython switches threads only at calls and at jumps back (loops). If the
        # bytes fit, neither of them comes between the read above and this write.
        self._allocated = allocated
        self.num_allocations += 1
        if allocated > self.peak:
            self.peak = allocated
            if allocated > self.highest:
                self.highest = allocated
                if self.contents is not None:
                    self.contents.new_peak(self.num_allocations)
        return chunk


# Called while a request does not fit, if it is not None: what exists then can be marked.
on_out_of_memory: Callable[[], None] | None = None


class Allocation(weakref.ref):
    """The `nbytes` bytes of a block. When the block is deleted, its meter's deque gets this.

    Block has no __del__ method, because Python ignores an exception that is raised there: a
    Ctrl-C at that moment would be lost. A weak reference with a callback in C executes no
    Python code.
    """

    __slots__ = ("born", "chunk", "kind", "line", "nbytes", "since")

    def lifetime(self, until: float) -> tuple[float, float, int, str]:
        """(from, until, bytes, kind), in simulated seconds: an entry of Contents.history."""
        return self.since, until, self.nbytes, self.kind


class Block:
    """One storage on a device. `key` is the storage's id, unique while the block exists."""

    __slots__ = ("__weakref__", "_address", "allocation", "key", "meter")

    def __init__(self, meter: Meter, key: int, nbytes: int):
        self.meter = meter
        self.key = key
        self.allocation = meter.allocate(self, -(-nbytes // UNIT) * UNIT)

    def resize(self, nbytes: int) -> None:
        """Set the block's size to `nbytes`, after an in-place operation resized the storage.

        Raises torch.OutOfMemoryError if the new size does not fit.
        """
        nbytes = -(-nbytes // UNIT) * UNIT
        if nbytes != self.allocation.nbytes:
            self.meter.resize(self.allocation, nbytes)
            self._address = None

    @property
    def kind(self) -> str:
        """What the memory is for: a kind of contents.py; for "vgpu" devices only if marked."""
        return getattr(self.allocation, "kind", contents.OTHER)

    def mark(self, kind: str) -> None:
        """Say of which kind the block is: one of those in contents.py."""
        self.allocation.kind = kind

    def address(self) -> int:
        """The block's address on its device: no two blocks overlap. A new size moves it.

        Few programs ask for it, so a block without the allocator has no address until then.
        """
        if self.allocation.chunk is not None:
            return self.allocation.chunk.address
        if getattr(self, "_address", None) is None:
            self._address = self.meter.next_address
            self.meter.next_address += self.allocation.nbytes
        return self._address


def keep_freed_memory() -> None:
    """Let the host's allocator keep up to 256 MiB of freed memory, as CUDA's allocator does.

    By default glibc returns the large blocks of a step to the system and requests them again
    in the next step. The system then has to zero their pages, which takes a fifth of a small
    training step. C libraries without mallopt are left unchanged. glibc cannot undo this
    setting, so it stays after control.stop.
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


def host_memory() -> int:
    """Bytes that this process can use without swapping, on the machine and in its cgroups.

    2**63 if the system does not say.
    """
    available = available_memory()
    return 2**63 if available is None else available
