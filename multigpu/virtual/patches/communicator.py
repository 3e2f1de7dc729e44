"""NCCL's communicators for virtual GPUs: kernels that run one after the other, and may wait.

A communicator has the same rules as NCCL's, so that what stands still there stands still here:
- Its kernels run in the order in which this rank has launched them. A kernel that waits for
  another rank holds up all later ones.
- The k-th collective of each rank meets the k-th collectives of the others. If they differ in
  operation, root, type or size, none of them ends (NCCL may also end with wrong numbers).
- The k-th send to a rank meets that rank's k-th receive. Tags mean nothing.
- The first kernel waits, on the host, until all ranks of the communicator are there; two of
  them on one GPU are an error. So does a rank's first collective on another GPU: NCCL has a
  communicator for each.

gloo moves the numbers, once the ranks have exchanged what they are about to do.
"""

import functools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from multigpu.errors import pluralize
from multigpu.virtual.patches.flight_recorder import NCCL_VERSION, Entry

if TYPE_CHECKING:
    from multigpu.virtual.patches.nccl_group import NcclGroup

Tensor = torch.Tensor
# The name of what a rank does when a GPU is new to a communicator.
CONNECTION = "a connection"
ANOTHER_GPU = (
    "a rank, not all, uses another GPU than in the group's collectives before: call "
    "torch.cuda.set_device(local_rank) before the first one"
)
# The numbers by which the ranks of a collective know that they call the same.
LABEL = 5
# A tag of tensors is TAGS × their bytes, modulo SIZES: sizes that are 128 MiB apart share one.
TAGS = 8
SIZES = 2**27
# Seconds after which a host that waits tells the other ranks so.
PATIENCE = 0.2


class Call(NamedTuple):
    """What a rank calls: a collective, a message, or several messages at once.

    operation  torch's name, such as "ALLREDUCE"
    number     its sequence number in the group
    numel_in   the elements that go in, and `numel_out` those that come out
    dtype      of the tensors
    sizes      that all ranks must agree on
    root       the root's rank in the group; -1 without a root
    peer       of a message: the other rank in the group; -1 for a collective
    line       the program's line, "train.py:12"
    """

    operation: str
    number: int
    numel_in: int
    numel_out: int
    dtype: torch.dtype
    sizes: tuple[int, ...] = ()
    root: int = -1
    peer: int = -1
    line: str = ""


class Mismatch(Exception):
    """The ranks' calls do not fit together: this kernel never ends."""


class Kernel:
    """A launch on a communicator, from there until its numbers have moved.

    `wait` and `is_completed` are those of gloo's works. `rows` has a row of numbers of each
    rank that took part, once the kernel is done. `stuck` says why it will never be.
    `started` and `ended` are in nanoseconds since the epoch.
    """

    def __init__(
        self,
        run: Callable[["Kernel"], None],
        calls: Sequence[Call],
        communicator: "Communicator",
    ):
        self.run = run
        self.calls = calls
        # The Message of each call, in the same order; none for a collective.
        self.messages: Sequence[Message] = ()
        self.communicator = communicator
        self.launched = time.monotonic()
        self.started: int | None = None
        self.ended: int | None = None
        self.done = threading.Event()
        self.error: Exception | None = None
        self.stuck = ""
        self.rows = torch.zeros(0, device="cpu")

    def wait(
        self, on_a_gpu_too: bool = False, give_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Let the host wait; raise the kernel's error.

        on_a_gpu_too  whether a GPU's host would wait, too, and not only its stream
        give_up       called every PATIENCE seconds: if it returns True, the wait ends
        """
        if not self.done.wait(PATIENCE):
            with waiting.on_a_gpu_too if on_a_gpu_too else waiting.here_only:
                while not self.done.wait(PATIENCE):
                    if give_up():
                        return
        if self.error is not None:
            raise self.error

    def wait_at_most(self, timeout: timedelta) -> None:
        """Let the host wait; if the kernel is older than that then, end its communicator.

        The kernel's error, which `wait` raises, is that of NCCL's watchdog.
        """
        with waiting.on_a_gpu_too:
            left = timeout.total_seconds() - (time.monotonic() - self.launched)
            if not self.done.wait(max(left, 0)):
                self.error = dist.DistBackendError(self.timeout_text())
                self.communicator.abort()

    def timeout_text(self) -> str:
        """The words of torch 2.13 for a kernel that runs too long (ProcessGroupNCCL.cpp)."""
        call, group = self.calls[0], self.communicator.group
        ran = (time.monotonic() - self.launched) * 1000
        return (
            f"[Rank {group.global_rank(group.rank())}] Watchdog caught collective operation "
            f"timeout: WorkNCCL(SeqNum={call.number}, OpType={call.operation}, "
            f"NumelIn={call.numel_in}, NumelOut={call.numel_out}, "
            f"Timeout(ms)={group.timeout.total_seconds() * 1000:.0f}) ran for {ran:.0f} "
            f"milliseconds before timing out."
        )

    def is_completed(self) -> bool:
        return self.done.is_set()

    def end(self, error: Exception | None = None) -> None:
        """Let the hosts that wait go on, or raise the error."""
        self.error = error
        self.ended = time.time_ns()
        self.done.set()

    def unfinished(self) -> list[Call]:
        """The calls that still wait for a rank."""
        arrived = {i for i, message in enumerate(self.messages) if message.fits()}
        return [call for i, call in enumerate(self.calls) if i not in arrived]


class _Waits:
    """Counts the threads of this process that are within a `with` of this object.

    `changed` is called with True when the first enters, and with False when the last leaves.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0
        self.changed: Callable[[bool], None] = lambda waits: None

    def __enter__(self) -> None:
        self._add(1)

    def __exit__(self, *error: Any) -> None:
        self._add(-1)

    def _add(self, number: int) -> None:
        with self.lock:
            before, self.count = self.count, self.count + number
            if bool(before) != bool(self.count):
                self.changed(bool(self.count))


class _Waiting:
    """The threads of this process that wait for a kernel.

    on_a_gpu_too  those that would wait on a GPU, too
    here_only     those whose stream alone would wait on a GPU
    """

    def __init__(self):
        self.here_only = _Waits()
        self.on_a_gpu_too = _Waits()

    def any(self) -> bool:
        return self.here_only.count + self.on_a_gpu_too.count > 0


waiting = _Waiting()


class Message(NamedTuple):
    """A part of a kernel: `payloads` go to, or come from, the rank `peer` of the group.

    `row` has the sender's or the receiver's numbers, which the peer gets. `peer_row` has the
    peer's when it is there, and NaN before.
    """

    is_send: bool
    peer: int
    payloads: list[Tensor]
    row: Tensor
    peer_row: Tensor

    def fits(self) -> bool:
        """Whether the peer is there, with as many bytes: the first number of a row."""
        return bool(self.row[0] == self.peer_row[0])


class Communicator:
    """The kernels of one rank. `ranks` are the ranks of the group that take part.

    `channel` tells a group's communicators apart: it is the first tag of their messages.
    """

    def __init__(self, group: "NcclGroup", ranks: Sequence[int], channel: int):
        self.group = group
        self.ranks = ranks
        self.channel = channel
        # The unfinished kernels; the first one runs.
        self.kernels: deque[Kernel] = deque()
        self._queue: SimpleQueue[Kernel | None] = SimpleQueue()
        self._launching = threading.Lock()
        self._thread: threading.Thread | None = None
        self._devices: set[int] = set()
        self._is_aborted = False

    def launch(
        self,
        run: Callable[[Kernel], None],
        *calls: Call,
        entry: Entry | None = None,
        begin: Callable[[], Any] | None = None,
        messages: Sequence[Message] = (),
    ) -> Kernel:
        """Launch a kernel; `run` moves its numbers, in this communicator's thread.

        entry     the kernel's in the flight recorder
        begin     starts what `run` waits for first; is called if no kernel is before this one
        messages  the Message of each call, if the calls are messages
        """
        if self._is_aborted:
            raise self.group.aborted_error()
        self.connect(calls)
        kernel = self._queue_kernel(run, calls, begin, messages)
        if entry is not None:
            entry.kernel = kernel
        return kernel

    def connect(self, calls: Sequence[Call]) -> None:
        """Let the host wait for all ranks, if this rank's GPU is new to the communicator.

        The communicator of a pair has one GPU on each side. `calls` are those that wait.
        """
        device = self.group.device_index()
        if device in self._devices or (self._devices and self.channel):
            return
        self._devices.add(device)
        self.group.used_devices.add(device)
        # A rank that waits in a call which would let a GPU's host go on counts as here.
        connection = self._queue_kernel(self._connect, calls)
        others = [rank for rank in self.ranks if rank != self.group.rank()]
        try:
            connection.wait(True, give_up=lambda: self.group.board.any_waits(others))
        except dist.DistBackendError:
            self._devices.remove(device)
            raise

    def _queue_kernel(
        self,
        run: Callable[[Kernel], None],
        calls: Sequence[Call],
        begin: Callable[[], Any] | None = None,
        messages: Sequence[Message] = (),
    ) -> Kernel:
        kernel = Kernel(run, calls, self)
        kernel.messages = messages
        # gloo pairs the works of the ranks in the order of their starts, so two threads of
        # the program must not start and launch in different orders.
        with self._launching:
            if begin is not None and not self.kernels:
                # The ranks' rows are on their way while this communicator's thread wakes up.
                # If a rank has gone, `run` tries again, and meets gloo's error where a kernel
                # can wait.
                try:
                    begin()
                except RuntimeError as error:
                    if not _is_of_gloo(error):
                        raise
            self.kernels.append(kernel)
            self._queue.put(kernel)
        if self._thread is None:
            name = f"communicator-{self.channel}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        return kernel

    def abort(self) -> None:
        """End the unfinished kernels, and refuse others, with NCCL's error."""
        self._is_aborted = True
        for kernel in list(self.kernels):
            kernel.end(kernel.error or self.group.aborted_error())

    def close(self) -> None:
        """End the thread, if no kernel is unfinished."""
        if self._thread is not None and not self.kernels:
            self._queue.put(None)
            self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        while (kernel := self._queue.get()) is not None:
            kernel.started = time.time_ns()
            failed = None
            try:
                kernel.run(kernel)
            except Mismatch as mismatch:
                kernel.stuck = str(mismatch)
                return
            except Exception as error:
                if _is_of_gloo(error):
                    kernel.stuck = "a rank has gone"
                    return
                failed = error
            if self._is_aborted:
                return
            kernel.run = None
            self.kernels.popleft()
            kernel.end(failed)

    def _connect(self, kernel: Kernel) -> None:
        """Wait for all ranks; raise NCCL's error if two are on one GPU."""
        gloo, rank = self.group.gloo, self.group.rank()
        gpus = {rank: self.group.gpu_identity()}
        if self.channel == 0:
            # As long a row as a collective's.
            row = torch.cat([gpus[rank], torch.zeros(1, device="cpu")])
            label = Call("", 0, 0, 0, torch.uint8)
            exchange = self._exchange(_labelled(row, CONNECTION, label))
            gpus = dict(enumerate(_agreed(*exchange)[:, :-1].tolist()))
        else:
            (peer,) = (number for number in self.ranks if number != rank)
            peer_gpu = torch.zeros_like(gpus[rank])
            works = [
                gloo.send([gpus[rank]], peer, self.channel),
                gloo.recv([peer_gpu], peer, self.channel),
            ]
            for work in works:
                work.wait()
            gpus = {rank: gpus[rank].tolist(), peer: peer_gpu.tolist()}
        for other, identity in gpus.items():
            if other != rank and identity == gpus[rank]:
                raise duplicate_error(rank, other, int(identity[1]))

    def _exchange(self, row: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Start to exchange the ranks' rows: (gloo's works, the matrix that they fill).

        It uses messages, because gloo's all-gather first wakes up a thread, and takes longer.
        """
        gloo, rank = self.group.gloo, self.group.rank()
        rows = row.new_empty(self.group.size(), len(row))
        rows[rank] = row
        works = []
        for peer in range(len(rows)):
            if peer != rank:
                works.append(gloo.recv([rows[peer]], peer, self.channel))
                works.append(gloo.send([row], peer, self.channel))
        return works, rows

    def collective(
        self,
        row: Tensor,
        name: str,
        call: Call,
        splits: list[int],
        move: Callable[[Tensor], list],
        entry: Entry | None,
    ) -> Kernel:
        """Launch a collective.

        row     this rank's numbers, which all ranks get
        name    what NCCL calls: several of torch's operations are one of NCCL's
        splits  of an all-to-all: the elements for each rank, then those from each
        move    starts gloo's works, given the ranks' rows
        entry   the kernel's in the flight recorder
        """
        labelled = _labelled(row, name, call)
        # Starts with the first call.
        exchange = functools.cache(lambda: self._exchange(labelled))

        def run(kernel: Kernel) -> None:
            kernel.rows = _agreed(*exchange())
            if splits:
                split_row = torch.tensor(splits, dtype=torch.float64, device="cpu")
                _check_splits(_finished(*self._exchange(split_row)).tolist())
            for work in move(kernel.rows):
                work.wait()

        return self.launch(run, call, entry=entry, begin=exchange)

    def messages(
        self, messages: Sequence[Message], calls: Sequence[Call], entry: Entry | None
    ) -> Kernel:
        """Launch messages that move at the same time; `calls` has one for each.

        A row and its tensors have tags of their own, and gloo keeps the order of equal tags.
        Tensors start with their row, before the ranks know that they fit. gloo ends a process
        whose receive is shorter than the message, so other sizes have other tags.
        """
        gloo, rank = self.group.gloo, self.group.rank()
        others = [message for message in messages if message.peer != rank]
        to_self = [message for message in messages if message.peer == rank]
        sent = [message for message in to_self if message.is_send]
        received = [message for message in to_self if not message.is_send]

        @functools.cache
        def begin() -> tuple[list[dist.Work], list[dist.Work]]:
            rows, payloads = [], []
            for message in others:
                first, second = (1, 2) if message.is_send else (2, 1)
                rows.append(gloo.send([message.row], message.peer, self.channel + first))
                rows.append(gloo.recv([message.peer_row], message.peer, self.channel + second))
                move = gloo.send if message.is_send else gloo.recv
                for payload in message.payloads:
                    tag = self.channel + 3 + payload.nbytes % SIZES * TAGS
                    payloads.append(move([payload], message.peer, tag))
            return rows, payloads

        def run(kernel: Kernel) -> None:
            if len(sent) != len(received):
                raise Mismatch("a batch has not as many sends to its own rank as receives")
            for pair in zip(sent, received, strict=True):
                _hand_over(*pair)
            rows, payloads = begin()
            for work in rows:
                work.wait()
            if not all(message.fits() for message in others):
                raise Mismatch("the sender and the receiver have different sizes")
            for work in payloads:
                work.wait()

        return self.launch(run, *calls, entry=entry, begin=begin, messages=messages)


def _hand_over(sent: Message, received: Message) -> None:
    """Move a message of a rank to itself."""
    if sent.row[0] != received.row[0]:
        raise Mismatch("the sender and the receiver have different sizes")
    sent.peer_row.copy_(received.row)
    received.peer_row.copy_(sent.row)
    for source, target in zip(sent.payloads, received.payloads, strict=True):
        target.view(source.dtype).copy_(source.view(target.shape))


def _is_of_gloo(error: Exception) -> bool:
    """Whether a process has ended, or a connection to it."""
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def _labelled(row: Tensor, name: str, call: Call) -> Tensor:
    """A row, and what all ranks of a collective must have in common: LABEL more float64."""
    # Checksums that a float64 holds, and that are the same in each process.
    texts = (name, str(call.dtype), str(call.sizes))
    numbers = [zlib.crc32(text.encode()) for text in texts]
    return torch.cat([row, row.new_tensor([*numbers, len(call.sizes), call.root])])


def _finished(works: list[dist.Work], rows: Tensor) -> Tensor:
    """The ranks' rows, when an exchange is done."""
    for work in works:
        work.wait()
    return rows


def _agreed(works: list[dist.Work], rows: Tensor) -> Tensor:
    """The ranks' rows, without their labels. Raises Mismatch if these differ."""
    labels = _finished(works, rows)[:, -LABEL:]
    if not (labels == labels[0]).all():
        if zlib.crc32(CONNECTION.encode()) in labels[:, 0]:
            raise Mismatch(ANOTHER_GPU)
        raise Mismatch("the ranks call different collectives")
    return rows[:, :-LABEL]


def _check_splits(rows: list[list[float]]) -> None:
    """Raise Mismatch if a rank sends another number of elements than its peer expects."""
    size = len(rows)
    for sender, row in enumerate(rows):
        for receiver in range(size):
            sent, expected = row[receiver], rows[receiver][size + sender]
            if sent != expected:
                raise Mismatch(
                    f"rank {sender} sends {pluralize(int(sent), 'element')} to rank "
                    f"{receiver}, which expects {expected:.0f}"
                )


def duplicate_error(rank: int, other: int, number: int) -> dist.DistBackendError:
    """NCCL's error for two ranks of a communicator on one GPU."""
    # A bus id stands for the GPU there: 0x1000 and up.
    return nccl_error(
        "invalid usage",
        "This usually reflects invalid usage of NCCL library.",
        f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device "
        f"{(number + 1) << 12:x}",
    )


def nccl_error(kind: str, meaning: str, last: str) -> dist.DistBackendError:
    """An error of NCCL in the words of torch 2.13 with NCCL 2.27."""
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {kind} "
        f"(run with NCCL_DEBUG=WARN for details), NCCL version {NCCL_VERSION}\n"
        f"nccl{kind.title().replace(' ', '')}: {meaning}\nLast error:\n{last}"
    )
