"""How gloo moves the numbers of each collective between the ranks of virtual GPUs.

gloo has fewer collectives than NCCL, and takes tensors of fewer shapes. The functions in this
file get gloo's group and the arguments of a method of torch's process group, with payloads in
the place of virtual tensors. They start gloo's works and return them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from multigpu.virtual.patches.work import Works

Tensor = torch.Tensor
# torch's own class: under the face of CUDA, torch.distributed has another one by this name.
Gloo = torch._C._distributed_c10d.ProcessGroupGloo
# A function of gloo's group and of a method's arguments: it returns objects with `wait`.
Move = Callable[..., list]
# What combines the numbers of two ranks, by torch's operation.
COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class Finished:
    """A work of gloo, after which a function still has to run."""

    def __init__(self, work: Any, finish: Callable[[], Any]):
        self.work = work
        self.finish = finish
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self.work.wait()
            self.finish()
            self.done = True

    def is_completed(self) -> bool:
        if not self.done and self.work.is_completed():
            self.wait()
        return self.done


class Pair:
    """gloo's group of two ranks, whose most used collectives are messages.

    They take less time: gloo's collectives first wake up a thread, and a sum needs two rounds.
    Sums equal gloo's, because a sum of two numbers does not depend on their order.
    """

    def __init__(self, gloo: Gloo):
        self.gloo = gloo

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gloo, name)

    def _swap(self, sent: Tensor, received: Tensor) -> Works:
        peer = 1 - self.gloo.rank()
        return Works([self.gloo.recv([received], peer, 0), self.gloo.send([sent], peer, 0)])

    def _halves(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's half, and the other's."""
        halves = both.view(2, both.numel() // 2)
        return halves[self.gloo.rank()], halves[1 - self.gloo.rank()]

    def allreduce(self, tensors: list[Tensor], options: Any) -> Finished:
        sent = _flat(tensors[0])
        received, reduce = torch.empty_like(sent), _operation(options)
        return Finished(self._swap(sent, received), lambda: reduce(sent, received, out=sent))

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        elements = _flat(tensors[0])
        if self.gloo.rank() == options.rootRank:
            return self.gloo.send([elements], 1 - self.gloo.rank(), 0)
        return self.gloo.recv([elements], options.rootRank, 0)

    def _allgather_base(self, output: Tensor, source: Tensor, *options: Any) -> Works:
        half, other_half = self._halves(output)
        half.copy_(source)
        return self._swap(half, other_half)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> Finished:
        half, other_half = self._halves(source)
        received, reduce = torch.empty_like(half), _operation(options)
        swap = self._swap(other_half, received)
        return Finished(swap, lambda: reduce(half, received, out=output))


def _operation(options: Any) -> Callable[..., Tensor]:
    """What combines the numbers of two ranks."""
    return next(combine for name, combine in COMBINE.items() if options.reduceOp == name)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def unchanged(method: str) -> Move:
    """The Move that calls gloo's method of this name with the same arguments."""

    def move(gloo: Gloo, *args: Any) -> list:
        return [getattr(gloo, method)(*args)]

    return move


def reducing(move: Move) -> Move:
    """The Move of a collective that reduces, also with operations that gloo does not have.

    These are the average, and NCCL's sum of tensors that each rank multiplies by a factor.
    """

    def scaling(gloo: Gloo, outputs: Tensor | list, *args: Any) -> list:
        options = args[-1]
        operation = options.reduceOp
        if operation == dist.ReduceOp.AVG:
            divisor = gloo.size()
        elif operation == dist.ReduceOp.PREMUL_SUM:
            # Its state is all that Python sees of it: the operation and the factor.
            divisor = 1 / operation.__getstate__()[1]
        else:
            return move(gloo, outputs, *args)
        options.reduceOp = dist.ReduceOp.SUM
        try:
            *works, last = move(gloo, outputs, *args)
        finally:
            options.reduceOp = operation
        tensors = [outputs] if isinstance(outputs, Tensor) else outputs
        return [*works, Finished(last, lambda: _divide(tensors, divisor))]

    return scaling


def _divide(tensors: list[Tensor], by: float | Tensor) -> None:
    for tensor in tensors:
        exact = tensor.is_floating_point() or tensor.is_complex()
        tensor.div_(by, rounding_mode=None if exact else "trunc")


_reduce = reducing(unchanged("reduce"))


def reduce(gloo: Gloo, tensors: list[Tensor], options: Any) -> list:
    """Only the root's tensor changes, as with NCCL. gloo would write sums into the others."""
    if gloo.rank() != options.rootRank:
        tensors = [tensor.clone() for tensor in tensors]
    return _reduce(gloo, tensors, options)


def all_gather(
    gloo: Gloo, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any
) -> list:
    """The outputs can have any shape, as with NCCL.

    The ranks' tensors can have different sizes: each rank then broadcasts its own.
    """
    (parts,), (source,) = outputs, inputs
    if all(part.shape == source.shape for part in parts):
        return [gloo.allgather(outputs, inputs, *options)]
    if all(part.numel() == source.numel() for part in parts):
        gathered = source.new_empty(len(parts), source.numel())
        work = gloo.allgather([list(gathered)], [source.reshape(-1)], *options)

        def unpack() -> None:
            for part, row in zip(parts, gathered, strict=True):
                part.copy_(row.view(part.shape))

        return [Finished(work, unpack)]
    parts[gloo.rank()].copy_(source)
    works = []
    for root, part in enumerate(parts):
        broadcast = dist.BroadcastOptions()
        broadcast.rootRank = root
        works.append(gloo.broadcast([part], broadcast))
    return works


def all_gather_single(gloo: Gloo, output: Tensor, source: Tensor, *options: Any) -> list:
    """The output can have any shape with as many elements as all inputs, as with NCCL."""
    return [gloo._allgather_base(output.view(-1), source.reshape(-1), *options)]


def reduce_scatter_single(gloo: Gloo, output: Tensor, source: Tensor, *options: Any) -> list:
    """The input can have any shape with as many elements as all outputs, as with NCCL."""
    return [gloo._reduce_scatter_base(output.view(-1), source.reshape(-1), *options)]


def pair_by_pair(move: Move) -> Move:
    """The Move of two lists, outputs and inputs, that calls `move` for each pair."""

    def every(gloo: Gloo, outputs: list, inputs: list, *options: Any) -> list:
        works = []
        for output, source in zip(outputs, inputs, strict=True):
            works += move(gloo, output, source, *options)
        return works

    return every


def all_to_all(gloo: Gloo, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> list:
    """Rank i gets inputs[i]; the tensors of a list can have different sizes."""
    sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
    sizes = [tensor.numel() for tensor in outputs]
    received = sent.new_empty(sum(sizes))
    work = gloo.alltoall_base(
        received, sent, sizes, [tensor.numel() for tensor in inputs], options
    )

    def unpack() -> None:
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.copy_(part.view(output.shape))

    return [Finished(work, unpack)]


_all_gather_all = pair_by_pair(all_gather_single)
_reduce_scatter_all = reducing(pair_by_pair(reduce_scatter_single))

# The new names of torch 2.13 for some methods.
NEW_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
# The method that torch calls → the collective's name (sim/network.py), and how gloo moves its
# numbers.
COLLECTIVES: dict[str, tuple[str, Move]] = {
    "allreduce": ("allreduce", reducing(unchanged("allreduce"))),
    "allreduce_coalesced": ("allreduce", reducing(unchanged("allreduce_coalesced"))),
    "broadcast": ("broadcast", unchanged("broadcast")),
    "reduce": ("reduce", reduce),
    "allgather": ("allgather", all_gather),
    "allgather_coalesced": ("allgather", unchanged("allgather_coalesced")),
    "_allgather_base": ("allgather", all_gather_single),
    "allgather_into_tensor_coalesced": ("allgather", _all_gather_all),
    "gather": ("gather", unchanged("gather")),
    "scatter": ("scatter", unchanged("scatter")),
    "reduce_scatter": ("reduce_scatter", reducing(unchanged("reduce_scatter"))),
    "_reduce_scatter_base": ("reduce_scatter", reducing(reduce_scatter_single)),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _reduce_scatter_all),
    "alltoall": ("alltoall", all_to_all),
    "alltoall_base": ("alltoall", unchanged("alltoall_base")),
}
