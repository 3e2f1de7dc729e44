"""The process group of virtual GPUs: gloo sends the numbers, the clock counts the time.

    dist.init_process_group("vgpu", …)

Time: a collective overlaps with the computation, as with NCCL. It starts when the last rank
arrives, and sim/network.py says how long it takes on the ranks' nodes. The ranks exchange
their simulated times and their nodes through gloo.
"""

import atexit
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from multigpu.virtual.ops.errors import no_numbers_error, stopped_error
from multigpu.virtual.ops.shapes import drop_numbers
from multigpu.virtual.ops.tensor import VirtualTensor, refresh_payload
from multigpu.virtual.ops.unknown_tensor import COLLECTIVE, UnknownTensor
from multigpu.virtual.patches.collectives import COLLECTIVES, NEW_NAMES, Gloo
from multigpu.virtual.patches.replacing import remove
from multigpu.virtual.patches.used_parameters import on_device
from multigpu.virtual.patches.work import VirtualWork, Works, map_args
from multigpu.virtual.sim import machine as _machine
from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.sim.names import INNER, runtime
from multigpu.virtual.sim.network import (
    Group,
    Network,
    collective_seconds,
    sent_bytes,
    transfer_seconds,
)
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

NAME = "vgpu"
DEVICES = ["vgpu", "cpu"]
# The orders of elements that NCCL takes.
CONTIGUOUS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def register(name: str, create: Callable, extended_api: bool = False) -> Callable[[], None]:
    """Make `name` a name for dist.init_process_group, and return a function that undoes it."""
    backend = dist.Backend
    backend.register_backend(name, create, extended_api, devices=DEVICES)

    def undo() -> None:
        remove(backend.backend_list, name)
        backend.backend_type_map.pop(name, None)
        backend.backend_capability.pop(name, None)
        backend.default_device_backend_map.pop(INNER, None)
        backend._plugins.pop(name.upper(), None)
        if name.upper() in vars(backend):
            delattr(backend, name.upper())

    return undo


# The groups that exist. A group can outlive stop(), so the set exists once per process.
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

    torch takes a group's name from its backends, and asks which devices have one: DeviceMesh
    does, for example. `placeholder` is the backend of both devices. It only has the name:
    torch's Python code calls the methods of this class, and where torch's C++ code would call
    a backend instead, the placeholder raises RuntimeError.

    The works of a queue run one after the other. Each device has a queue ("collective",
    index), because NCCL has a communicator for each device. The queues ("send", peer) and
    ("recv", peer) have the messages. `queues` holds the unfinished works by these keys, and
    `ends` the time at which each queue's last finished work ended.
    """

    def __init__(self, gloo: Gloo, rank: int, size: int):
        super().__init__(rank, size)
        self.gloo = gloo
        # What moves the tensors of the host.
        self.host_gloo = gloo
        # gloo itself cannot be the backend, because a group never gives back a backend, and
        # gloo's threads would then live as long as a DDP model.
        options = FakeProcessGroup.Options()
        options.error_on_collective = True
        placeholder = FakeProcessGroup._create_internal(rank, size, options)
        for device in DEVICES:
            backend_type = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(torch.device(device), backend_type, placeholder)
        self._set_default_backend(backend_type)
        self.queues: dict[tuple, deque[VirtualWork]] = {}
        self.ends: dict[tuple, float] = {}
        # torch's C++ code does not keep the Python object of a work alive, so this does.
        self.recent: deque[VirtualWork] = deque(maxlen=256)
        # The works since _start_coalescing; None outside of such a block.
        self.coalesced: list[dist.Work] | None = None
        _open.add(self)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """End gloo's threads while Python still runs. dist.destroy_process_group calls this.

        A thread that frees a tensor while Python is ending aborts the process
        (pytorch/pytorch#190489).
        """
        self.recent.clear()
        self.gloo = self.host_gloo = None

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
        last = self._wait_for_all(time)
        if running:
            running.clock.wait_host(last)
        return Works([])

    def _wait_for_all(self, time: float) -> float:
        """Wait for all ranks; return the largest of their numbers `time`."""
        times = torch.tensor([time], dtype=torch.float64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.gloo.allreduce([times], options).wait()
        return times.item()

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One work for all collectives and messages since _start_coalescing."""
        works = self.coalesced or []
        self.coalesced = None
        return Works(works)

    def collective(self, method: str, args: tuple) -> dist.Work:
        """Start the collective that torch calls `method`, with the arguments `args`."""
        name, move = COLLECTIVES[method]
        work = self._begin(name, args)
        if work is None:
            works = move(self.host_gloo, *args)
            # DDP wants the future of gloo's own work.
            is_own = len(works) == 1 and isinstance(works[0], dist.Work)
            return works[0] if is_own else Works(works)
        network = work.meter.machine.network
        arrival, node = work.arrival.tolist()
        row = [arrival, _traffic(name, args, self.size()), node]
        rows = self._start_collective(
            work, method, args, torch.tensor(row, dtype=torch.float64, device="cpu")
        )
        root = getattr(args[-1], "rootRank", 0)
        parts = splits_of(method, args, self.size()) if name == "alltoall" else []
        itemsize = next(tensors_in(args)).itemsize

        def span() -> tuple[float, float]:
            # The last rank's arrival; the bytes of the rank with the most, because ranks can
            # send unequal parts in an all-to-all.
            arrivals, sizes, nodes = rows().T.tolist()
            nbytes = max(sizes)
            group = self._group(network, nodes)
            sent = sent_bytes(name, nbytes, self.rank(), self.size(), root)
            if parts:
                sent = {rank: parts[rank] * itemsize for rank in sent}
            for peer, part in sent.items():
                self._count(work.meter, peer, part, nodes[peer])
            return max(arrivals), KERNEL_OVERHEAD + collective_seconds(name, nbytes, group)

        self._enqueue(work, ("collective", work.meter.index), span)
        return work

    def _start_collective(
        self, work: VirtualWork, method: str, args: tuple, row: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Start to move a collective's numbers, and to exchange the ranks' rows.

        Returns a function that returns the matrix of all rows when `work.works` are done.
        """
        rows = row.new_empty(self.size(), len(row))
        if not work.has_shapes:
            work.works += COLLECTIVES[method][1](self.gloo, *payloads_of(args))
        work.works.append(self.gloo._allgather_base(rows.view(-1), row))
        return lambda: rows

    def _count(self, meter: Meter, rank: int, nbytes: float, node: float) -> None:
        """Count bytes that this rank sends to a rank of this group, which is on `node`."""
        place = self.global_rank(rank), self._node(meter), int(node)
        meter.machine.clock.sent[place] += nbytes

    def global_rank(self, rank: int) -> int:
        """The number in the world of a rank of this group."""
        ranks = dist.distributed_c10d._world.pg_group_ranks.get(self)
        if ranks is None:
            return rank
        return next((number for number, in_group in ranks.items() if in_group == rank), rank)

    def _group(self, network: Network, nodes: list[float]) -> Group:
        """The ranks' GPUs for the time of a collective; `nodes` has each rank's node."""
        return network.group_on(nodes)

    def _node(self, meter: Meter) -> int:
        """The node of this rank's device."""
        rank = dist.get_rank() if dist.is_initialized() else self.rank()
        return meter.machine.node(meter.index, rank)

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
        work = self._begin(name, (tensors,))
        if work is None:
            return getattr(self.host_gloo, name)(prepare(tensors), rank, 3 * tag)
        network = work.meter.machine.network
        nbytes = sum(tensor.nbytes for tensor in tensors)
        payloads = [] if work.has_shapes else prepare(payloads_of(tensors))
        row = torch.tensor([nbytes, *work.arrival.tolist()], dtype=torch.float64, device="cpu")
        peer_row = torch.full_like(row, math.nan)
        self._start_message(work, name, tensors[0], rank, tag, payloads, row, peer_row)

        def span() -> tuple[float, float]:
            _, time, node = row.tolist()
            _, peer_time, peer_node = peer_row.tolist()
            link = network.path(node, peer_node)
            if name == "send":
                self._count(work.meter, rank, nbytes, peer_node)
            return max(time, peer_time), transfer_seconds(nbytes, link)

        self._enqueue(work, (name, rank), span)
        return work

    def _start_message(
        self,
        work: VirtualWork,
        name: str,
        tensor: torch.Tensor,
        rank: int,
        tag: int,
        payloads: list[torch.Tensor],
        row: torch.Tensor,
        peer_row: torch.Tensor,
    ) -> None:
        """Start a message, and exchange the rows of both ranks: bytes, arrival, node."""
        # The message, the sender's row and the receiver's have three different tags.
        own_tag, peer_tag = (1, 2) if name == "send" else (2, 1)
        if payloads:
            work.works.append(getattr(self.gloo, name)(payloads, rank, 3 * tag))
        work.works += [
            self.gloo.send([row], rank, 3 * tag + own_tag),
            self.gloo.recv([peer_row], rank, 3 * tag + peer_tag),
        ]

    def _begin(self, name: str, args: tuple) -> VirtualWork | None:
        """The work of a collective or message; None if no argument is a virtual tensor.

        Raises RuntimeError for a tensor of the host without numbers.
        """
        tensors = list(tensors_in(args))
        virtual = [tensor for tensor in tensors if type(tensor) is VirtualTensor]
        if not virtual:
            # gloo would read and write memory that an UnknownTensor does not have.
            moves = isinstance(self.host_gloo, Gloo)
            if moves and any(type(tensor) is UnknownTensor for tensor in tensors):
                raise no_numbers_error(COLLECTIVE)
            return None
        meter = virtual[0]._block.meter
        if not meter.alive or meter.asserted:
            # The kernel of an assert has ended long before NCCL's kernel is launched.
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
        work = VirtualWork(meter, virtual, args[0], name)
        # Shapes have nothing to send: only time passes.
        work.has_shapes = any(tensor._payload.is_meta for tensor in virtual)
        arrival = [clock.launch_collective(meter.index), self._node(meter)]
        work.arrival = torch.tensor(arrival, dtype=torch.float64, device="cpu")
        self.recent.append(work)
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def _enqueue(
        self, work: VirtualWork, key: tuple, span: Callable[[], tuple[float, float]]
    ) -> None:
        """Add a work to the queue `key`, where it starts after the earlier works.

        `span` returns the time at which all ranks are ready, and the seconds that the work
        takes. It is called when the ranks have exchanged their times.
        """
        queue = self.queues.setdefault(key, deque())
        queue.append(work)

        def schedule() -> tuple[float, float]:
            while queue[0] is not work:
                queue[0].finish()
            queue.popleft()
            ready, seconds = span()
            start = max(ready, self.ends.get(key, 0.0))
            self.ends[key] = start + seconds
            return start, self.ends[key]

        work.schedule = schedule
        work.leave_queue = lambda: queue.remove(work)


def _method(name: str) -> Callable[..., dist.Work]:
    # NCCL sends a list of tensors as messages, and refuses no strides there.
    takes_any_strides = name == "alltoall" or "coalesced" in name

    def method(self: VirtualGroup, *args: Any) -> dist.Work:
        if not takes_any_strides:
            _check_contiguous(args)
        return self.collective(name, tuple(on_device(value) for value in args))

    return method


def _check_contiguous(args: tuple) -> None:
    """Raise NCCL's ValueError for a virtual tensor that is sparse or not contiguous.

    Tensors in nested lists, such as the outputs of all_gather, can have any strides, because
    NCCL copies them.
    """
    for value in args:
        for tensor in value if isinstance(value, list) else (value,):
            if type(tensor) is not VirtualTensor:
                continue
            if tensor.layout is not torch.strided:
                raise ValueError(f"Tensors must be {runtime()} and dense")
            if not any(tensor.is_contiguous(memory_format=form) for form in CONTIGUOUS):
                raise ValueError("Tensors must be contiguous")


for _name in COLLECTIVES:
    setattr(VirtualGroup, _name, _method(_name))
for _new, _name in NEW_NAMES.items():
    setattr(VirtualGroup, _new, getattr(VirtualGroup, _name))


def tensors_in(args: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def payloads_of(value: Any) -> Any:
    """The same nested lists and tuples, with payloads in the place of virtual tensors."""
    return map_args(lambda part: part._payload if type(part) is VirtualTensor else part, value)


def splits_of(method: str, args: tuple, size: int) -> list[int]:
    """Of an all-to-all the elements that go to each rank, then those that come from each."""
    outputs, inputs = args[0], args[1]
    if method == "alltoall":
        return [tensor.numel() for tensor in (*inputs, *outputs)]
    splits = []
    for tensor, rows in ((inputs, args[3]), (outputs, args[2])):
        if rows:
            row_elements = tensor[:1].numel() if len(tensor) else 0
            splits += [number * row_elements for number in rows]
        else:
            splits += [tensor.numel() // size] * size
    return splits


def _traffic(name: str, args: tuple, ranks: int) -> int:
    """This rank's bytes for collective_seconds."""
    totals = [sum(tensor.nbytes for tensor in tensors_in((value,))) for value in args]
    if name in ("gather", "scatter"):
        # Only the root has the list of all chunks.
        return ranks * min((total for total in totals if total), default=0)
    return max(totals)


def open_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Gloo:
    """The group of gloo that moves a VirtualGroup's numbers; all ranks wait for each other."""
    store = dist.PrefixStore("vgpu", store)
    gloo = Gloo(store, rank, size, timeout)
    # A rank that ends at once could still be needed by one that connects to a third.
    if store.add("connected", 1) == size:
        store.set("all connected", "")
    store.wait(["all connected"], timeout)
    return gloo
