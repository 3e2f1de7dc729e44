"""Collectives of a world in which every rank has the same numbers as this rank.

SameRanks has the methods of gloo's process group that collectives.py calls. Each is done at
once: a sum over n ranks is n times this rank's number, and what is gathered is repeated.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
Op = dist.ReduceOp


class Done(dist.Work):
    """A work that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future()
        future.set_result(None)
        return future


class SameRanks:
    """Rank `rank` of `size` ranks that all have the same numbers."""

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        op = Op.SUM if options is None else options.reduceOp
        for tensor in tensors:
            self._reduce(tensor, op)
        return Done()

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> dist.Work:
        return self.allreduce(tensors, options) if options.rootRank == self._rank else Done()

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        return Done()

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *options: Any
    ) -> dist.Work:
        # On ranks other than the root of a gather, there are no outputs.
        for tensors, source in zip(outputs, inputs, strict=False):
            for tensor in tensors:
                tensor.copy_(source)
        return Done()

    gather = allgather

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *options: Any
    ) -> dist.Work:
        for tensors in outputs:
            for tensor, source in zip(tensors, inputs, strict=True):
                tensor.copy_(source)
        return Done()

    def _allgather_base(self, output: Tensor, source: Tensor, *options: Any) -> dist.Work:
        output.view(self._size, -1).copy_(source.view(1, -1))
        return Done()

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> dist.Work:
        for tensor, parts in zip(outputs, inputs, strict=False):
            tensor.copy_(parts[self._rank])
        return Done()

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> dist.Work:
        for tensor, parts in zip(outputs, inputs, strict=True):
            tensor.copy_(parts[self._rank])
        return self.allreduce(outputs, options)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> dist.Work:
        output.view(-1).copy_(source.view(self._size, -1)[self._rank])
        return self.allreduce([output], options)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        options: Any = None,
    ) -> dist.Work:
        """Each rank sends what this rank would send to itself.

        Parts of different sizes stay as they are: they cannot come from equal ranks.
        """
        if len(set(output_rows)) <= 1 and len(set(input_rows)) <= 1:
            chunk = source.view(self._size, -1)[self._rank]
            output.view(self._size, -1).copy_(chunk.expand(self._size, -1))
        return Done()

    def barrier(self, options: Any = None) -> dist.Work:
        return Done()

    def monitored_barrier(self, *arguments: Any, **more: Any) -> None:
        """All ranks are here."""

    def _reduce(self, tensor: Tensor, op: Op) -> None:
        if op == Op.SUM:
            tensor.mul_(self._size)
        elif op == Op.PRODUCT:
            tensor.pow_(self._size)
        elif op == Op.BXOR and self._size % 2 == 0:
            tensor.zero_()
