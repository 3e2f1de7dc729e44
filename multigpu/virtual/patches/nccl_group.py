"""A process group that keeps NCCL's rules: the one of "vgpu", and of "nccl" for CUDA programs.

VirtualGroup counts the time. Here a collective or a message is a kernel of a communicator
(communicator.py), a tensor that NCCL refuses is an error in NCCL's words, and a kernel that
never ends is found by the watchdog (watchdog.py).
"""

import functools
import itertools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper

from multigpu.virtual.ops.tensor import VirtualTensor
from multigpu.virtual.patches import process_group
from multigpu.virtual.patches.collectives import COLLECTIVES, Gloo, Pair
from multigpu.virtual.patches.communicator import (
    Call,
    Communicator,
    Kernel,
    Message,
    nccl_error,
)
from multigpu.virtual.patches.flight_recorder import (
    COALESCED,
    NOTHING,
    Entry,
    Side,
    recorder,
)
from multigpu.virtual.patches.process_group import (
    NAME,
    VirtualGroup,
    open_gloo,
    payloads_of,
    splits_of,
    tensors_in,
)
from multigpu.virtual.patches.watchdog import Board, program_line, watchdog
from multigpu.virtual.patches.work import VirtualWork, map_args

Tensor = torch.Tensor
Op = dist.ReduceOp
# torch's OpType of the methods, as its watchdog prints it, and the flight recorder's names
# (torch 2.13, ProcessGroupNCCL.cpp).
OPERATIONS = {
    "allreduce": ("ALLREDUCE", "all_reduce"),
    "allreduce_coalesced": ("ALLREDUCE_COALESCED", "allreduce_coalesced"),
    "broadcast": ("BROADCAST", "broadcast"),
    "reduce": ("REDUCE", "reduce"),
    "allgather": ("ALLGATHER", "all_gather"),
    "_allgather_base": ("_ALLGATHER_BASE", "_all_gather_base"),
    "allgather_into_tensor_coalesced": ("COALESCED", "all_gather_into_tensor_coalesced"),
    "gather": ("GATHER", "gather"),
    "scatter": ("SCATTER", "scatter"),
    "reduce_scatter": ("REDUCE_SCATTER", "reduce_scatter"),
    "_reduce_scatter_base": ("_REDUCE_SCATTER_BASE", "_reduce_scatter_base"),
    "reduce_scatter_tensor_coalesced": ("COALESCED", "reduce_scatter_tensor_coalesced"),
    "alltoall": ("ALLTOALL", "all_to_all"),
    "alltoall_base": ("ALLTOALL_BASE", "all_to_all"),
}
# The methods whose arguments are outputs and inputs. The others have one argument for both.
HAVE_INPUTS = (
    "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base",
)  # fmt: skip
# All ranks must agree on the sizes of the inputs here, and of the first argument elsewhere.
AGREE_ON_INPUTS = (
    "_allgather_base", "allgather_into_tensor_coalesced", "gather", "reduce_scatter",
)  # fmt: skip
# A list of equal tensors is one tensor for NCCL here.
LISTS = ("allgather", "reduce_scatter")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
# What ncclDataType_t has no name for (c10d/NCCLUtils.cpp); bool and float8 travel as bytes.
REFUSED = {
    torch.int16: "Short", torch.uint16: "UInt16", torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}  # fmt: skip
FLOAT8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
NOT_IN_NCCL = {Op.BAND: "BAND", Op.BOR: "BOR", Op.BXOR: "BXOR"}
# The first tag of messages of a pair's communicator. That of all ranks begins at tag 0.
CHANNEL = 4
# The node of a barrier, in its row.
NO_NODE = -1.0
_numbers = itertools.count()


class NcclGroup(VirtualGroup):
    """A VirtualGroup by NCCL's rules. `store` is the group's, `timeout` that of its works."""

    def __init__(
        self, gloo: Gloo, store: dist.Store, rank: int, size: int, timeout: timedelta
    ):
        super().__init__(gloo, rank, size)
        self.timeout = timeout
        # The group's number in this process.
        self.number = next(_numbers)
        self.is_aborted = False
        self.board = Board(store, rank, size, watchdog.folder)
        # The numbers of the last collective and of the last message.
        self.sequence = 0
        self.sequence_of_messages = 0
        # The communicators: that of all ranks, which also has batches of messages, and one
        # for each other rank with which this one exchanges single messages.
        self.communicators: dict[int, Communicator] = {}
        # The device of the last collective or message; None of a barrier that names none.
        self.last_device: int | None = None
        # The devices with which any of the communicators has connected.
        self.used_devices: set[int] = set()
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch's own check of what the ranks call.
        self._checker: dist.ProcessGroup | None = None
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            checked, helper = (
                open_gloo(dist.PrefixStore(name, store), rank, size, timeout)
                for name in ("checked", "helper")
            )
            self._checker = _ProcessGroupWrapper(checked, helper)
        self._batch: list[tuple[VirtualWork, Message, Call]] | None = None
        watchdog.watch(self)

    def communicator(self, peer: int | None = None) -> Communicator:
        """The communicator of all ranks, or that of this rank and `peer`."""
        if self.is_aborted:
            raise self.aborted_error()
        key = -1 if peer is None else peer
        if key not in self.communicators:
            if peer is None:
                communicator = Communicator(self, range(self.size()), 0)
            else:
                communicator = Communicator(self, sorted((self.rank(), peer)), CHANNEL)
            self.communicators[key] = communicator
        return self.communicators[key]

    def _compare(self, method: str, args: tuple) -> None:
        """Raise torch's error, in the words that it has for CUDA, if the ranks call others."""
        if self._checker is None:
            return
        try:
            getattr(self._checker, method)(*map_args(_on_host, args))
        except RuntimeError as error:
            text = str(error).replace("device=cpu", "device=cuda")
            raise type(error)(text) from None

    def abort(self) -> None:
        """End all unfinished kernels with an error, and refuse others.

        On a GPU the waits of these kernels end without an error, and with unfinished numbers.
        """
        self.is_aborted = True
        for communicator in self.communicators.values():
            communicator.abort()

    def aborted_error(self) -> dist.DistBackendError:
        # The words of torch 2.13, NCCLUtils.cpp.
        return dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}. ")

    def shutdown(self) -> None:
        watchdog.forget(self)
        for communicator in self.communicators.values():
            communicator.close()
        super().shutdown()

    def gpu_identity(self) -> Tensor:
        """Two numbers that no other GPU has: here each rank has a GPU of its own."""
        return torch.tensor([-1.0, self.rank()], dtype=torch.float64, device="cpu")

    def device_index(self) -> int:
        """The GPU of the collective that this rank launches; here all of a rank's are one."""
        return 0

    def connect(self) -> None:
        """Make the communicator at once, as NCCL does for a group with `device_id`."""
        line = program_line(sys._getframe(1))
        self.communicator().connect([Call("INIT", 0, 0, 0, torch.uint8, line=line)])

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        self.last_device = next(iter(opts.device_ids), None) if opts is not None else None
        return super().barrier(opts)

    def unfinished(self) -> list[Kernel]:
        """The kernels that run or wait for a communicator, without those that have failed."""
        return [
            kernel
            for communicator in list(self.communicators.values())
            for kernel in list(communicator.kernels)
            if kernel.error is None
        ]

    def described(self) -> list[dict]:
        """The kernels that each communicator runs now, for the watchdog's report."""
        calls = []
        for communicator in list(self.communicators.values()):
            for kernel in list(communicator.kernels)[:1]:
                for call in kernel.unfinished() if kernel.error is None else ():
                    call = call._asdict()
                    call["dtype"] = str(call["dtype"]).removeprefix("torch.")
                    for key in ("peer", "root"):
                        if call[key] >= 0:
                            call[key] = self.global_rank(call[key])
                    calls.append(call | {"group": self.title(), "stuck": kernel.stuck})
        return calls

    def title(self) -> str:
        """The group's name for people."""
        world = dist.distributed_c10d._world
        if self is world.default_pg or self not in world.pg_group_ranks:
            return "the default group"
        ranks = ", ".join(str(rank) for rank in sorted(world.pg_group_ranks[self]))
        return f"the group of ranks {ranks} (group {world.pg_names.get(self, '?')})"

    def _start_collective(
        self, work: VirtualWork, method: str, args: tuple, row: Tensor
    ) -> Callable[[], Tensor]:
        name, move = COLLECTIVES[method]
        call, splits = self._call(method, name, args)
        self.last_device = work.meter.index
        self._compare(method, args)
        payloads = () if work.has_shapes else map_args(_wire, payloads_of(args))

        def moves(rows: Tensor) -> list:
            return [] if work.has_shapes else move(self._mover(), *payloads)

        entry = self._recorded(method, args)
        kernel = self.communicator().collective(row, name, call, splits, moves, entry)
        work.works.append(kernel)
        return lambda: kernel.rows

    def _mover(self) -> Gloo | Pair:
        return Pair(self.gloo) if self.size() == 2 else self.gloo

    def _recorded(self, method: str, args: tuple) -> Entry | None:
        """The flight recorder's entry of a collective."""
        if not recorder().size:
            return None
        values = (_inputs_of(method, args), args[0])
        inputs, outputs = (_side(value, method in LISTS) for value in values)
        if method == "scatter":
            # torch passes them in this order.
            inputs, outputs = outputs, inputs
        name = f"nccl:{OPERATIONS[method][1]}"
        if method not in LISTS or len(inputs) == len(outputs):
            return recorder().record(self, name, inputs, outputs)
        # Parts of other sizes are a collective for each rank.
        for rank, part in enumerate(outputs if method == "allgather" else inputs):
            if method == "allgather":
                source = inputs if rank == self.rank() else [part]
                recorder().record(self, "nccl:_broadcast_oop", source, [part])
            else:
                target = outputs if rank == self.rank() else [part]
                recorder().record(self, "nccl:_reduce_oop", [part], target)
        return recorder().record(self, f"nccl:{OPERATIONS[method][0]}_coalesced", [], [])

    def collective(self, method: str, args: tuple) -> dist.Work:
        if any(type(tensor) is VirtualTensor for tensor in tensors_in(args)):
            _check_nccl(method, args)
            _check_sizes(method, args, self.size())
        return super().collective(method, args)

    def _call(self, method: str, name: str, args: tuple) -> tuple[Call, list[int]]:
        """What a collective is, and for an all-to-all the sizes of all its parts."""
        self.sequence += 1
        agreed = [t.numel() for t in tensors_in((args[method in AGREE_ON_INPUTS],))]
        if method in LISTS and len(set(agreed)) == 1:
            agreed = agreed[:1]
        call = Call(
            OPERATIONS[method][0],
            self.sequence,
            sum(tensor.numel() for tensor in tensors_in((_inputs_of(method, args),))),
            sum(tensor.numel() for tensor in tensors_in((args[0],))),
            next(tensors_in(args)).dtype,
            () if name == "alltoall" else tuple(agreed),
            getattr(args[-1], "rootRank", -1),
            line=program_line(sys._getframe(1)),
        )
        return call, splits_of(method, args, self.size()) if name == "alltoall" else []

    def _wait_for_all(self, time: float) -> float:
        # NCCL's barrier is an all-reduce of one number.
        self.sequence += 1
        line = program_line(sys._getframe(1))
        call = Call("BARRIER", self.sequence, 1, 1, torch.float32, (1,), line=line)
        row = torch.tensor([time, 4.0, NO_NODE], dtype=torch.float64, device="cpu")

        def move(rows: Tensor) -> list:
            # The rows' exchange is a barrier; a rank that calls all_reduce needs the number.
            if (rows[:, -1] == NO_NODE).all():
                return []
            number = torch.zeros(1, device="cpu")
            return [self._mover().allreduce([number], dist.AllreduceOptions())]

        side = [(torch.Size([1]), torch.float32)]
        entry = recorder().record(self, "nccl:all_reduce_barrier", side, side)
        kernel = self.communicator().collective(row, "allreduce", call, [], move, entry)
        kernel.wait(on_a_gpu_too=True)
        return kernel.rows[:, 0].max().item()

    def _start_message(
        self,
        work: VirtualWork,
        name: str,
        tensor: Tensor,
        rank: int,
        tag: int,
        payloads: list[Tensor],
        row: Tensor,
        peer_row: Tensor,
    ) -> None:
        # A batch has one number.
        self.sequence_of_messages += not self._batch
        size, line = tensor.numel(), program_line(sys._getframe(1))
        number = self.sequence_of_messages
        call = Call(name.upper(), number, size, size, tensor.dtype, peer=rank, line=line)
        self.last_device = work.meter.index
        payloads = map_args(_wire, payloads)
        message = Message(name == "send", rank, payloads, row, peer_row)
        towards = "->" if message.is_send else "<-"
        title = f"nccl:{name} {self.rank()}{towards}{rank}"
        side = [(tensor.shape, tensor.dtype)]
        entry = recorder().record(self, title, side, side, True)
        if self._batch is not None:
            self._batch.append((work, message, call))
            return
        # With `device_id` single messages use the communicator of all ranks.
        peer = rank if self.bound_device_id is None else None
        communicator = self.communicator(peer)
        work.works.append(communicator.messages([message], [call], entry))

    def recv_anysource(self, tensors: list, tag: int) -> dist.Work:
        raise RuntimeError("ProcessGroupNCCL does not support recvAnysource")

    def _start_coalescing(self, device: torch.device) -> None:
        super()._start_coalescing(device)
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        batch, self._batch = self._batch or [], None
        if batch:
            communicator = self.communicator()
            messages = [message for _, message, _ in batch]
            calls = [call for _, _, call in batch]
            entry = recorder().record(self, COALESCED, [], [])
            kernel = communicator.messages(messages, calls, entry)
            for work, _, _ in batch:
                work.works.append(kernel)
        return super()._end_coalescing(device)


def batch_in_one_kernel(original: Callable) -> Callable:
    """torch.distributed.batch_isend_irecv: a batch in an NcclGroup is one kernel."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        first = p2p_op_list[0] if p2p_op_list else None
        group = first and (first.group or dist.group.WORLD)
        if not isinstance(group, NcclGroup) or type(first.tensor) is not VirtualTensor:
            return original(p2p_op_list)
        group._start_coalescing(first.tensor.device)
        try:
            original(p2p_op_list)
        finally:
            work = group._end_coalescing(first.tensor.device)
        return [work]

    return batch_isend_irecv


def _inputs_of(method: str, args: tuple) -> Any:
    """The argument with a collective's inputs, which can be its outputs, too."""
    return args[1] if method in HAVE_INPUTS else args[0]


def _side(value: Any, is_one: bool) -> Side:
    """What the flight recorder has of a collective's inputs, or of its outputs.

    With `is_one` a list of equal tensors is one tensor, as for NCCL.
    """
    side = [(tensor.shape, tensor.dtype) for tensor in tensors_in((value,))]
    if is_one and len(set(side)) == 1 < len(side):
        shape, dtype = side[0]
        return [((len(side), *shape), dtype)]
    # Only the root has the list of a gather or of a scatter.
    return side or NOTHING


def _on_host(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _wire(tensor: Tensor) -> Tensor:
    """The payload as gloo can send it: float8, which nothing reduces, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def _check_nccl(method: str, args: tuple) -> None:
    """Raise NCCL's error for a type or an operation that it does not have (torch 2.13)."""
    if method == "allgather_coalesced":
        raise RuntimeError("ProcessGroupNCCL does not support allgather_coalesced")
    dtypes = {tensor.dtype for tensor in tensors_in(args)}
    for dtype in dtypes:
        if dtype in REFUSED:
            raise RuntimeError(
                f"Input tensor data type is not supported for NCCL process group: "
                f"{REFUSED[dtype]}"
            )
    operation = getattr(args[-1], "reduceOp", None)
    if operation is None or COLLECTIVES[method][0] not in REDUCING:
        return
    if any(dtype in FLOAT8 for dtype in dtypes):
        raise RuntimeError("Unsupported Float8 type for NCCL reduction")
    for refused, text in NOT_IN_NCCL.items():
        if operation == refused:
            raise ValueError(f"Cannot use ReduceOp.{text} with NCCL")
    if torch.bool in dtypes:
        if operation == Op.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if operation == Op.SUM:
            # NCCL's sum of booleans is their maximum.
            args[-1].reduceOp = Op.MAX
    exact = (torch.float16, torch.float32, torch.bfloat16, torch.float64)
    if operation == Op.PREMUL_SUM and not dtypes <= set(exact):
        raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")


def _check_sizes(method: str, args: tuple, size: int) -> None:
    """Raise torch's error for tensors that do not fit together, or NCCL's for a root (2.13).

    Where they do not look, NCCL writes beyond the tensors' ends: gloo's error stands then.
    """
    first, second, root = args[0], args[1], getattr(args[-1], "rootRank", 0)
    wrong: list[tuple[bool, Exception]] = []
    if method == "_allgather_base":
        text = "output tensor size must be equal to world_size times input tensor size"
        error = TypeError("output tensor must have the same type as input tensor")
        wrong.append((first.dtype != second.dtype, error))
        wrong.append((first.numel() != second.numel() * size, ValueError(text)))
    elif method == "_reduce_scatter_base":
        text = "input tensor must be the same size as output size times world size"
        error = TypeError("input tensor must be the same type as the output tensor.")
        wrong.append((first.dtype != second.dtype, error))
        wrong.append((second.numel() != first.numel() * size, ValueError(text)))
    elif method == "alltoall_base":
        for rows, splits in ((len(second), args[3]), (len(first), args[2])):
            text = "Tensor's dim 0 does not divide equally across group size"
            if splits:
                text = "Split sizes doesn't match total dim 0 size"
                error = RuntimeError("Number of tensor splits not equal to group size")
                wrong.append((len(splits) != size, error))
            wrong.append((rows != sum(splits) if splits else rows % size, RuntimeError(text)))
    elif method in ("gather", "scatter"):
        name, side = f"ProcessGroupNCCL::{method}", "output" if method == "gather" else "input"
        wrong.append((not 0 <= root < size, ValueError(f"{name}: invalid root rank: {root}")))
        for parts in first if method == "gather" else second:
            text = (
                f"{name}: Incorrect {side} list size {len(parts)}. {side.capitalize()} list "
                f"size should be {size}, same as size of the process group."
            )
            wrong.append((len(parts) != size, ValueError(text)))
    elif not 0 <= root < size:
        text = f"{method.capitalize()} : invalid root {root} (root should be in the 0..{size} "
        raise nccl_error("invalid argument", "Invalid value for an argument.", f"{text}range)")
    for is_wrong, error in wrong:
        if is_wrong:
            raise error


def open_patient_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Gloo:
    """A group of gloo that waits as NCCL's kernels do: until the watchdog ends them."""
    gloo = open_gloo(store, rank, size, timeout)
    gloo._set_default_timeout(timedelta(days=365))
    return gloo


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> NcclGroup:
    gloo = open_patient_gloo(store, rank, size, timeout)
    group = NcclGroup(gloo, store, rank, size, timeout)
    # A kernel waits in a thread: what the program sends from the host must not pass it.
    group.host_gloo = open_gloo(dist.PrefixStore("host", store), rank, size, timeout)
    return group


def register() -> Callable[[], None]:
    """Make "vgpu" a name for dist.init_process_group."""
    return process_group.register(NAME, _create)
