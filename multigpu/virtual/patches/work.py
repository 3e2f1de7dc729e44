"""A collective or a message between virtual GPUs, from its start until it is done."""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size
from torch.utils.weak import TensorWeakRef

from multigpu.virtual.ops.tensor import VirtualTensor, last_element
from multigpu.virtual.patches.communicator import Kernel
from multigpu.virtual.sim.memory import Meter


class VirtualWork(dist.Work):
    """The work that a collective returns. An operation that uses its tensors waits for it.

    As with NCCL, `wait` makes later work of the current stream wait, but not the host.

    meter     the device's meter
    works     gloo's works, collectives.Finished, or a communicator's kernel: they move the
              numbers and exchange the simulated times
    has_shapes  whether the tensors have no numbers to move
    arrival   two float64: the simulated time at which this rank arrived, and its node
    stream    the number of the stream that was current at the start
    schedule  returns start and end in simulated seconds; called when `works` are done
    end       when the work ends, in simulated seconds; None before `wait`
    """

    def __init__(
        self,
        meter: Meter,
        tensors: list[VirtualTensor],
        result: Any,
        name: str,
    ):
        super().__init__()
        clock = meter.machine.clock
        self.meter = meter
        self.works: list = []
        self.name = name
        self.has_shapes = False
        self.phase = clock.phase()
        self.stream = clock.current_streams()[meter.index].number
        self.arrival = torch.zeros(0, device="cpu")
        self.schedule: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        # Called if it fails: later works of its queue do not wait for it.
        self.leave_queue: Callable[[], None] = lambda: None
        self.end: float | None = None
        self._result = result
        # An operation that uses some of these bytes waits for this work. A send has none,
        # because it sends a copy.
        used = [] if name == "send" else tensors
        self._bytes = [(tensor._block, *_bytes_of(tensor)) for tensor in used]
        self._keys = {id(block) for block, *_ in self._bytes} or {id(self)}
        for key in self._keys:
            clock.pending.setdefault(key, []).append(self)

    def uses(self, tensor: VirtualTensor) -> bool:
        """Whether this work, before its end, uses bytes of the tensor's memory."""
        first, end = _bytes_of(tensor)
        return any(
            block is tensor._block and first < own_end and own_first < end
            for block, own_first, own_end in self._bytes
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            if timeout and isinstance(work, Kernel):
                work.wait_at_most(timeout)
        self.finish()
        self.meter.machine.clock.delay(self.meter.index, self.end)
        return True

    def finish(self) -> None:
        """Move the numbers, and find when the work ends; no stream and no host waits."""
        clock = self.meter.machine.clock
        if self.end is None:
            try:
                for work in self.works:
                    work.wait()
            except Exception:
                # It is raised once: the tensors are then free for another group.
                self.end = self.arrival[0].item()
                self.leave_queue()
                self._free()
                raise
            start, self.end = self.schedule()
            kind = "transfer" if self.name in ("send", "recv") else "collective"
            device = self.meter.index
            span = (start, self.end)
            clock.log += (device, kind, self.phase, self.name, *span, None, self.stream, None)
            self._free()

    def _free(self) -> None:
        """Leave the works that tensors wait for."""
        pending = self.meter.machine.clock.pending
        for key in self._keys:
            pending[key].remove(self)
            if not pending[key]:
                del pending[key]
        # The group keeps this object for a while, but must not keep the tensors' memory.
        self._bytes = []
        self.works = []
        result, self._result = self._result, map_args(TensorWeakRef, self._result)
        if _get_work_registry_size():
            _leave_registry(result)

    synchronize = block_current_stream = wait

    def get_future(self) -> torch.futures.Future:
        # Complete at once, because an operation that uses the tensors waits for this work.
        future = torch.futures.Future()
        future.set_result(_strong(self._result))
        return future

    def is_completed(self) -> bool:
        """Whether the host's time has reached the end. As with NCCL, asking is no waiting."""
        if self.end is None:
            if not all(work.is_completed() for work in self.works):
                return False
            if any(isinstance(work, Kernel) and work.error for work in self.works):
                return True
            self.finish()
        return self.meter.machine.clock.has_passed(self.end)

    def result(self) -> Any:
        self.wait()
        return _strong(self._result)


class Works(dist.Work):
    """Several works, or collectives.Finished, as one."""

    def __init__(self, works: list):
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def _bytes_of(tensor: VirtualTensor) -> tuple[int, int]:
    """The first byte of its block that the tensor uses, and the byte after the last one.

    A tensor with gaps counts as all bytes between its first and its last one.
    """
    payload = tensor._payload
    if payload.layout is not torch.strided:
        return 0, sys.maxsize
    if not payload.numel():
        return 0, 0
    first, end = payload.storage_offset(), last_element(payload) + 1
    return first * payload.itemsize, end * payload.itemsize


def _leave_registry(value: Any) -> None:
    """Remove a tensor's work, or those of nested lists of tensors, from torch's registry.

    torch does so when a program waits for a functional collective. It looks for the tensor's
    storage, and each view of a virtual tensor has a storage of its own.
    """
    if isinstance(value, torch.Tensor):
        torch.ops._c10d_functional.wait_tensor(value)
        return
    for part in value:
        _leave_registry(part)


def map_args(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same nested lists and tuples, with `function(tensor)` in the place of a tensor.

    The arguments of a process group have no other containers. nested.map_tensors looks for
    others, too, and takes four times as long.
    """
    if type(value) in (list, tuple):
        return type(value)(map_args(function, part) for part in value)
    return function(value) if isinstance(value, torch.Tensor) else value


def _strong(value: Any) -> Any:
    """The tensors of weak references (None: it is deleted); tensors stay unchanged."""
    if isinstance(value, TensorWeakRef):
        return value()
    if isinstance(value, torch.Tensor):
        return value
    return [_strong(part) for part in value]
