"""How do processes with virtual GPUs talk? A process group that hands the numbers to gloo and keeps simulated time.

    dist.init_process_group("vgpu", …)

Time: as NCCL's kernels, a collective runs beside the computation. It starts when the last rank arrives and takes the
alpha-beta time of a ring (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005). The ranks tell each other their simulated times through gloo. All ranks count as joined by the link
that vgpu.start was given.
"""

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import TensorWeakRef

from multigpu.vgpu.ops.shapes import forget
from multigpu.vgpu.ops.tensor import VirtualTensor, follow
from multigpu.vgpu.sim import machine as _machine
from multigpu.vgpu.sim.memory import Meter
from multigpu.vgpu.sim.network import ring_seconds
from multigpu.vgpu.sim.presets import KERNEL_OVERHEAD

NAME = "vgpu"


class VirtualWork(dist.Work):
    """A collective under way. Whoever reads its tensors first waits for their numbers; see Clock.settle.

    `wait` does what it does with NCCL: what the device runs later waits, the host goes on.
    """

    def __init__(
        self, meter: Meter, tensors: list[VirtualTensor], result: Any, works: list, name: str
    ):
        super().__init__()
        clock = meter.machine.clock
        self.meter, self.result_, self.works, self.name = meter, result, works, name
        self.blocks = (
            [] if name == "send" else [tensor._block for tensor in tensors]
        )  # who uses them waits for this work
        self.phase = clock.phase()
        self.times = torch.zeros(
            0
        )  # when this rank arrived; after the exchange, when the last one did
        self.schedule: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self.end: float | None = None
        self.keys = [id(block) for block in self.blocks] or [id(self)]
        clock.pending.update(dict.fromkeys(self.keys, self))

    def wait(self, timeout: timedelta | None = None) -> bool:
        clock = self.meter.machine.clock
        if self.end is None:
            for work in self.works:
                work.wait()
            start, self.end = self.schedule()
            kind = "transfer" if self.name in ("send", "recv") else "collective"
            clock.log += (self.meter.index, kind, self.phase, self.name, start, self.end, None)
            for key in self.keys:
                if clock.pending.get(key) is self:
                    del clock.pending[key]
            self.blocks, self.works = [], []
            self.result_ = _weak(
                self.result_
            )  # `recent` keeps this object, which must not keep the tensors' memory
        clock.wait(self.meter.index, self.end)
        return True

    def get_future(self) -> torch.futures.Future:
        # Complete at once: whoever uses the tensors settles the collective before.
        future = torch.futures.Future()
        future.set_result(_strong(self.result_))
        return future

    def is_completed(self) -> bool:
        return self.end is not None

    def result(self) -> Any:
        self.wait()
        return _strong(self.result_)


_open: weakref.WeakSet["VirtualGroup"] = weakref.WeakSet()


@atexit.register
def _close() -> None:
    """For who ends without dist.destroy_process_group. A group with work under way is left: its peer may be gone."""
    for group in list(_open):
        if not any(group.queues.values()):
            group.shutdown()


class VirtualGroup(dist.ProcessGroup):
    """A process group for tensors of virtual GPUs, and for those of the host, which go to gloo as they are."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("vgpu", store), rank, size, timeout)
        # Lanes: () has the collectives, ("send", peer) and ("recv", peer) the messages. Works of a lane not yet done, and
        # when its last one ended.
        self.queues: dict[tuple, deque[VirtualWork]] = {}
        self.ends: dict[tuple, float] = {}
        self.recent: deque[VirtualWork] = deque(
            maxlen=256
        )  # torch's C++ side does not keep a work's Python half alive
        _open.add(self)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """What dist.destroy_process_group calls: end gloo's threads now, while Python still runs.

        One that lets go of a tensor while Python is ending aborts the process (pytorch/pytorch#190489).
        """
        self.recent.clear()
        self.gloo = None

    def _start(self, name: str, args: tuple, call: Callable) -> tuple[VirtualWork | None, Any]:
        """Send the payloads on their way. Tensors of the host: the second result is gloo's own work."""
        tensors = list(_tensors(args))
        virtual = [tensor for tensor in tensors if type(tensor) is VirtualTensor]
        if not virtual:
            return None, call(*args)
        meter = virtual[0]._block.meter
        for tensor in tensors:
            if tensor.device != meter.device:
                raise RuntimeError(
                    f"Tensors of one collective must be on one device, but found {meter.device} and {tensor.device}"
                )
        meter.machine.clock.settle(virtual)
        if not meter.machine.compute:
            for tensor in virtual:
                follow(tensor)
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    forget(
                        tensor
                    )  # one rank may have a number where another has a shape: all or none send it
        shapes = any(
            tensor._payload.is_meta for tensor in virtual
        )  # nothing to send, only time passes
        works = [] if shapes else [call(*_payloads(args))]
        work = VirtualWork(meter, virtual, args[0], works, name)
        self.recent.append(work)
        return work, None

    def _collective(self, name: str, args: tuple, call: Callable) -> Any:
        work, plain = self._start(name, args, call)
        if work is None:
            return plain
        clock, index = work.meter.machine.clock, work.meter.index
        seconds = KERNEL_OVERHEAD + ring_seconds(
            name, _traffic(name, args, self.size()), self.size(), work.meter.machine.link
        )
        work.times = torch.tensor([clock.arrive(index)], dtype=torch.float64)
        latest = dist.AllreduceOptions()
        latest.reduceOp = dist.ReduceOp.MAX
        work.works.append(self.gloo.allreduce([work.times], latest))
        self._in_turn(work, (), seconds, work.times.item)
        return work

    def send(self, tensors: list, rank: int, tag: int) -> Any:
        # From a copy: with NCCL nothing waits for a send but who calls `wait`, so the tensor may be written again.
        return self._between_two(
            "send",
            tensors,
            rank,
            tag,
            lambda payloads: [payload.clone() for payload in payloads],
        )

    def recv(self, tensors: list, rank: int, tag: int) -> Any:
        return self._between_two("recv", tensors, rank, tag, lambda payloads: payloads)

    def _between_two(
        self, name: str, tensors: list, rank: int, tag: int, ready: Callable[[list], list]
    ) -> Any:
        """A message starts when both are there, as with NCCL. Each tells the other when it was."""
        move = getattr(self.gloo, name)
        work, plain = self._start(
            name, (tensors,), lambda payloads: move(ready(payloads), rank, 3 * tag)
        )
        if work is None:
            return plain
        link, clock = work.meter.machine.link, work.meter.machine.clock
        work.times = torch.tensor([clock.arrive(work.meter.index)], dtype=torch.float64)
        theirs = torch.zeros(1, dtype=torch.float64)
        own, other = (1, 2) if name == "send" else (2, 1)
        work.works += [
            self.gloo.send([work.times], rank, 3 * tag + own),
            self.gloo.recv([theirs], rank, 3 * tag + other),
        ]
        seconds = link.latency + sum(tensor.nbytes for tensor in tensors) / link.bandwidth
        self._in_turn(
            work, (name, rank), seconds, lambda: max(work.times.item(), theirs.item())
        )
        return work

    def _in_turn(
        self, work: VirtualWork, lane: tuple, seconds: float, ready: Callable[[], float]
    ) -> None:
        """The works of a lane run one after the other, in the order of their calls, each when it is `ready`."""
        queue = self.queues.setdefault(lane, deque())
        queue.append(work)

        def schedule() -> tuple[float, float]:
            while queue[0] is not work:
                queue[0].wait()
            queue.popleft()
            start = max(ready(), self.ends.get(lane, 0.0))
            self.ends[lane] = start + seconds
            return start, self.ends[lane]

        work.schedule = schedule

    def barrier(self, opts: Any = None) -> Any:
        """All ranks' hosts wait for each other, and for their devices, as NCCL's barrier does."""
        running = _machine.running()
        times = torch.tensor(
            [running.clock.synchronize() if running else 0.0], dtype=torch.float64
        )
        latest = dist.AllreduceOptions()
        latest.reduceOp = dist.ReduceOp.MAX
        self.gloo.allreduce([times], latest).wait()
        if running:
            running.clock.wait_host(times.item())
        return self.gloo.barrier(opts or dist.BarrierOptions())


def _method(name: str, gloo_name: str) -> Callable:
    def method(self: VirtualGroup, *args: Any) -> Any:
        return self._collective(name, args, getattr(self.gloo, gloo_name))

    return method


# What torch calls on a group → what it is called in gloo. torch 2.13 has new names for three of them.
for _call, (_name, _gloo_name) in {
    "allreduce": ("allreduce", "allreduce"),
    "allreduce_coalesced": ("allreduce", "allreduce_coalesced"),
    "broadcast": ("broadcast", "broadcast"),
    "reduce": ("reduce", "reduce"),
    "allgather": ("allgather", "allgather"),
    "_allgather_base": ("allgather", "_allgather_base"),
    "all_gather_single": ("allgather", "_allgather_base"),
    "gather": ("gather", "gather"),
    "scatter": ("scatter", "scatter"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter"),
    "_reduce_scatter_base": ("reduce_scatter", "_reduce_scatter_base"),
    "reduce_scatter_single": ("reduce_scatter", "_reduce_scatter_base"),
    "alltoall_base": ("alltoall", "alltoall_base"),
    "all_to_all_single": ("alltoall", "alltoall_base"),
}.items():
    setattr(VirtualGroup, _call, _method(_name, _gloo_name))


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _weak(value: Any) -> Any:
    return (
        TensorWeakRef(value)
        if isinstance(value, torch.Tensor)
        else [_weak(part) for part in value]
    )


def _strong(value: Any) -> Any:
    if isinstance(value, TensorWeakRef):
        return value()
    return value if isinstance(value, torch.Tensor) else [_strong(part) for part in value]


def _payloads(value: Any) -> Any:
    if type(value) is VirtualTensor:
        return value._payload
    return type(value)(map(_payloads, value)) if type(value) in (list, tuple) else value


def _traffic(name: str, args: tuple, ranks: int) -> int:
    """The bytes that ring_seconds counts: the same number on every rank, also where only the root has all pieces."""
    totals = [sum(tensor.nbytes for tensor in _tensors((value,))) for value in args]
    least = min((total for total in totals if total), default=0)
    return least if name in ("allreduce", "broadcast", "reduce", "alltoall") else least * ranks


def register() -> None:
    """Make "vgpu" a name for dist.init_process_group, once a process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, VirtualGroup, devices=["vgpu", "cpu"])
        # DDP times its steps for its own log. It has no timer for a virtual GPU, and would say so on each rank.
        dist.Logger.set_runtime_stats_and_log = lambda self: None
