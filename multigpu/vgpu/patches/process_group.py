"""The process group of virtual GPUs: gloo sends the numbers, the clock counts the time.

    dist.init_process_group("vgpu", …)

Time: a collective overlaps with the computation, as with NCCL. It starts when the last rank
arrives, and sim/network.py says how long it takes on the ranks' nodes. The ranks exchange
their simulated times and their nodes through gloo.
"""

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multigpu.vgpu.ops.errors import stopped_error
from multigpu.vgpu.ops.shapes import drop_numbers
from multigpu.vgpu.ops.tensor import VirtualTensor, refresh_payload
from multigpu.vgpu.patches.work import VirtualWork
from multigpu.vgpu.sim import machine as _machine
from multigpu.vgpu.sim.network import collective_seconds, transfer_seconds
from multigpu.vgpu.sim.presets import KERNEL_OVERHEAD

NAME = "vgpu"

# The groups that exist. A group can outlive vgpu.stop(), so the set exists once per process.
_open: weakref.WeakSet["VirtualGroup"] = weakref.WeakSet()


@atexit.register
def _close() -> None:
    """At exit, shut down the groups that the program did not destroy.

    A group with unfinished work is not shut down: the rank that it waits for may have ended.
    """
    for group in list(_open):
        if not any(group.queues.values()):
            group.shutdown()


class VirtualGroup(dist.ProcessGroup):
    """A process group for tensors of virtual GPUs. Tensors of the host go to gloo unchanged.

    The works of a lane run one after the other. Each device has a lane ("collective", index),
    because NCCL has a communicator for each device. The lanes ("send", peer) and
    ("recv", peer) have the messages. `queues` holds each lane's unfinished
    works. `ends` holds the time at which each lane's last finished work ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("vgpu", store), rank, size, timeout)
        self.queues: dict[tuple, deque[VirtualWork]] = {}
        self.ends: dict[tuple, float] = {}
        # torch's C++ code does not keep the Python object of a work alive, so this does.
        self.recent: deque[VirtualWork] = deque(maxlen=256)
        _open.add(self)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """End gloo's threads while Python still runs. dist.destroy_process_group calls this.

        A thread that frees a tensor while Python is ending aborts the process
        (pytorch/pytorch#190489).
        """
        self.recent.clear()
        self.gloo = None

    def send(self, tensors: list, rank: int, tag: int) -> dist.Work:
        # As with NCCL, only `wait` waits for a send. The program can write the tensor before
        # that, so a copy is sent.
        def copies(payloads: list[torch.Tensor]) -> list[torch.Tensor]:
            return [payload.clone() for payload in payloads]

        return self._message("send", tensors, rank, tag, copies)

    def recv(self, tensors: list, rank: int, tag: int) -> dist.Work:
        return self._message("recv", tensors, rank, tag, lambda payloads: payloads)

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        """The hosts of all ranks wait for each other and for their devices, as with NCCL."""
        running = _machine.running()
        time = running.clock.synchronize() if running else 0.0
        times = torch.tensor([time], dtype=torch.float64)
        self._latest(times).wait()
        if running:
            running.clock.wait_host(times.item())
        return self.gloo.barrier(opts or dist.BarrierOptions())

    def collective(self, name: str, args: tuple, call: Callable[..., dist.Work]) -> dist.Work:
        """Start a collective. `call` is gloo's method; `args` are torch's arguments."""
        work = self._start(name, args, call)
        if work is None:
            return call(*args)
        network = work.meter.machine.network
        nbytes = _traffic(name, args, self.size())
        # The time of each rank's arrival becomes the time of the last one. A node's number is
        # at its rank's place, and the other places have -1.
        arrival, node = work.arrival.tolist()
        exchanged = torch.full((1 + self.size(),), -1.0, dtype=torch.float64)
        exchanged[0] = arrival
        exchanged[1 + self.rank()] = node
        work.works.append(self._latest(exchanged))

        def span() -> tuple[float, float]:
            last, *nodes = exchanged.tolist()
            group = network.group_on(nodes)
            return last, KERNEL_OVERHEAD + collective_seconds(name, nbytes, group)

        self._enqueue(work, ("collective", work.meter.index), span)
        return work

    def _message(
        self,
        name: str,
        tensors: list,
        rank: int,
        tag: int,
        prepare: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> dist.Work:
        """Start a message. Its simulated start is when both ranks have called, as with NCCL.

        The ranks exchange the simulated times of their calls.
        """
        move = getattr(self.gloo, name)

        def call(payloads: list[torch.Tensor]) -> dist.Work:
            return move(prepare(payloads), rank, 3 * tag)

        work = self._start(name, (tensors,), call)
        if work is None:
            return call(tensors)
        network = work.meter.machine.network
        nbytes = sum(tensor.nbytes for tensor in tensors)
        peer_arrival = torch.zeros(2, dtype=torch.float64)
        # The message, the sender's arrival and the receiver's have three different tags.
        own_tag, peer_tag = (1, 2) if name == "send" else (2, 1)
        work.works += [
            self.gloo.send([work.arrival], rank, 3 * tag + own_tag),
            self.gloo.recv([peer_arrival], rank, 3 * tag + peer_tag),
        ]

        def span() -> tuple[float, float]:
            time, node = work.arrival.tolist()
            peer_time, peer_node = peer_arrival.tolist()
            link = network.path(node, peer_node)
            return max(time, peer_time), transfer_seconds(nbytes, link)

        self._enqueue(work, (name, rank), span)
        return work

    def _start(
        self, name: str, args: tuple, call: Callable[..., dist.Work]
    ) -> VirtualWork | None:
        """Start to move the payloads; return None if no argument is a virtual tensor."""
        tensors = list(_tensors(args))
        virtual = [tensor for tensor in tensors if type(tensor) is VirtualTensor]
        if not virtual:
            return None
        meter = virtual[0]._block.meter
        if not meter.alive:
            raise stopped_error(virtual[0])
        for tensor in tensors:
            if tensor.device != meter.device:
                raise RuntimeError(
                    f"Tensors of one collective must be on one device, "
                    f"but found {meter.device} and {tensor.device}"
                )
        clock = meter.machine.clock
        clock.wait_for_collectives(virtual)
        if not meter.machine.compute:
            for tensor in virtual:
                refresh_payload(tensor)
                # One rank can have numbers where another has a shape, but all must send or
                # none.
                if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                    drop_numbers(tensor)
        # Shapes have nothing to send: only time passes.
        has_shapes = any(tensor._payload.is_meta for tensor in virtual)
        works = [] if has_shapes else [call(*_payloads(args))]
        work = VirtualWork(meter, virtual, args[0], works, name)
        rank = dist.get_rank() if dist.is_initialized() else self.rank()
        arrival = [clock.launch_collective(meter.index), meter.machine.node(meter.index, rank)]
        work.arrival = torch.tensor(arrival, dtype=torch.float64)
        self.recent.append(work)
        return work

    def _latest(self, times: torch.Tensor) -> dist.Work:
        """Replace each rank's numbers by the largest of all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self.gloo.allreduce([times], options)

    def _enqueue(
        self, work: VirtualWork, lane: tuple, span: Callable[[], tuple[float, float]]
    ) -> None:
        """Add a work to its lane, where it starts after the earlier works.

        `span` returns the time at which all ranks are ready, and the seconds that the work
        takes. It is called when the ranks have exchanged their times.
        """
        queue = self.queues.setdefault(lane, deque())
        queue.append(work)

        def schedule() -> tuple[float, float]:
            while queue[0] is not work:
                queue[0].wait()
            queue.popleft()
            ready, seconds = span()
            start = max(ready, self.ends.get(lane, 0.0))
            self.ends[lane] = start + seconds
            return start, self.ends[lane]

        work.schedule = schedule


# The method that torch calls → the collective's name, and gloo's method.
# torch 2.13 has new names for three of them.
COLLECTIVES = {
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
}


def _method(name: str, gloo_name: str) -> Callable[..., dist.Work]:
    def method(self: VirtualGroup, *args: Any) -> dist.Work:
        return self.collective(name, args, getattr(self.gloo, gloo_name))

    return method


for _torch_name, _names in COLLECTIVES.items():
    setattr(VirtualGroup, _torch_name, _method(*_names))


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _payloads(value: Any) -> Any:
    """The same nested lists and tuples, with payloads in the place of virtual tensors."""
    if type(value) is VirtualTensor:
        return value._payload
    if type(value) in (list, tuple):
        return type(value)(_payloads(part) for part in value)
    return value


def _traffic(name: str, args: tuple, ranks: int) -> int:
    """The bytes for collective_seconds: the same number on every rank, including the root."""
    totals = [sum(tensor.nbytes for tensor in _tensors((value,))) for value in args]
    smallest = min((total for total in totals if total), default=0)
    if name in ("allreduce", "broadcast", "reduce", "alltoall"):
        return smallest
    return smallest * ranks


def register() -> None:
    """Make "vgpu" a name for dist.init_process_group."""
    dist.Backend.register_backend(NAME, VirtualGroup, devices=["vgpu", "cpu"])
