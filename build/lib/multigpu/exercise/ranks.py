"""torch.distributed for a student's process: each collective is a message to the checks.

The checks play the network: they see each call, in its order, with its values, and answer when
all ranks have called. A rank learns nothing of the others but what the checks send.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "checks"
OPERATIONS = {"SUM": "sum", "AVG": "avg", "MAX": "max", "MIN": "min", "PRODUCT": "prod"}


def operation_of(options: Any) -> str:
    """The name of a reduction. Raises ValueError for one that is not an arithmetic one."""
    name = options.reduceOp.op.name
    if name not in OPERATIONS:
        raise ValueError(f"ReduceOp.{name} is not known here: use {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


class Requests:
    """Sends requests, and hands each answer to the one who waits for it.

    failed   the error of an answer that could not be used
    """

    def __init__(self, send: Callable[[dict], Any]):
        self.send = send
        self.numbers = itertools.count()
        self.waiting: dict[int, Callable[[dict], None]] = {}
        self.lock = threading.Lock()
        self.failed: Exception | None = None

    def ask(self, request: dict, on_answer: Callable[[dict], None]) -> None:
        with self.lock:
            number = next(self.numbers)
            self.waiting[number] = on_answer
        self.send({"ask": request, "number": number})

    def answer(self, message: dict) -> None:
        self.waiting.pop(message["number"])(message)


class CheckedGroup(dist.ProcessGroup):
    """The process group: all methods send a request and return its Work."""

    def __init__(self, rank: int, size: int, requests: Requests, name: str):
        super().__init__(rank, size)
        self.requests = requests
        self.name = name
        self.keep: list[Any] = []  # Work objects do not keep their future's Python part alive

    def getBackendName(self) -> str:
        return BACKEND

    def _ask(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        **details: Any,
    ) -> dist.Work:
        future = torch.futures.Future()

        def finish(message: dict) -> None:
            try:
                with torch.no_grad():
                    for output, answer in zip(outputs, message["tensors"], strict=True):
                        output.copy_(answer.reshape(output.shape))
            except (RuntimeError, ValueError) as error:
                # Work.wait() does not raise the exception of a future.
                self.requests.failed = ValueError(
                    f"{kind}: an output of a wrong size: {error}"
                )
            future.set_result(outputs)

        request = {"kind": kind, "group": self.name, "tensors": [t.detach() for t in inputs]}
        self.requests.ask(request | details, finish)
        work = torch._C._distributed_c10d._create_work_from_future(future)
        self.keep.append(future)
        return work

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        operation = operation_of(opts) if opts is not None else "sum"
        return self._ask("all_reduce", tensors, tensors, operation=operation)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        # On other ranks the tensor stays: torch does not say what it is then.
        root = opts.rootRank
        outputs = tensors if self.rank() == root else []
        return self._ask("reduce", tensors, outputs, operation=operation_of(opts), root=root)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        root = opts.rootRank if opts is not None else 0
        return self._ask("broadcast", tensors, tensors, root=root)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._ask("barrier", [], [])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        return self._ask("all_gather", inputs, outputs[0])

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.allgather([list(output.chunk(self.size()))], [input], opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        operation = operation_of(opts) if opts is not None else "sum"
        return self._ask("reduce_scatter", inputs[0], outputs, operation=operation)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter([output], [list(input.chunk(self.size()))], opts)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        received = outputs[0] if outputs else []
        return self._ask("gather", inputs, received, root=opts.rootRank)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        return self._ask("scatter", inputs[0] if inputs else [], outputs, root=opts.rootRank)

    def alltoall(self, *_: Any) -> dist.Work:
        raise ValueError("all-to-all is not known here: use send and recv, or all_gather")

    alltoall_base = alltoall

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._ask("send", tensors, [], peer=rank, tag=tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._ask("recv", [], tensors, peer=rank, tag=tag)

    # torch 2.11 and 2.12 have these names for the two methods above.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


_world: Requests | None = None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.gate = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        answered = threading.Event()
        answers: list[dict] = []

        def finish(message: dict) -> None:
            answers.append(message)
            answered.set()

        _world.ask({"kind": "gate", "name": ctx.gate, "tensors": []}, finish)
        answered.wait()
        return gradient * answers[0]["tensors"][0].to(gradient.dtype), None


def gate(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the tensor. In a check, backward asks the checks for a factor at this point.

    The gradient is multiplied by the factor. So a rank cannot know the gradients behind a gate
    before the checks have seen that backward has come to the gate. Without a check, backward
    multiplies by nothing.
    """
    return tensor if _world is None else _Gate.apply(tensor, name)


def join_world(rank: int, size: int, requests: Requests) -> None:
    """init_process_group, with the checks as the network."""
    global _world
    _world = requests

    all_ranks = size

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> CheckedGroup:
        if size < all_ranks:
            raise ValueError(
                f"a group of {size} of the {all_ranks} ranks is not known here: use one of "
                f"all ranks"
            )
        return CheckedGroup(rank, size, requests, f"group {next(groups)}")

    groups = itertools.count()
    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    store = dist.HashStore()
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store)
