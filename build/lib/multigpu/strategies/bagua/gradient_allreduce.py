"""gradient_allreduce: all ranks average their gradients during backward, in plain DDP."""

import torch
import torch.distributed as dist
from torch import nn

from multigpu.strategies.bagua.base import Algorithm, Target, check_hierarchical
from multigpu.strategies.bagua.hierarchy import Hierarchy


class GradientAllReduce(Algorithm):
    """DDP. A rank sends 8N(n−1)/n bytes per step, for N float32 parameters and n ranks.

    hierarchical   True: reduce within each node first; see hierarchy.py
    average        False: the gradients are summed
    """

    def __init__(self, hierarchical: bool = False, average: bool = True):
        self.hierarchical = check_hierarchical(hierarchical)
        self.average = average
        self.hierarchy: Hierarchy | None = None

    def _attach(self, target: Target) -> nn.Module:
        wrapped = target.wrap(target.model)
        self.group = wrapped.process_group
        if self.hierarchical:
            self.hierarchy = Hierarchy(target.group)
        if self.hierarchical or not self.average:
            wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def detach(self) -> None:
        """Drop the references to the process groups."""
        self.hierarchy = None
        self.group = None

    def _hook(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        vector = bucket.buffer()
        if self.hierarchy is not None:
            return done(self.hierarchy.run(vector, self._all_reduce, self.average))
        work = dist.all_reduce(vector, self._operation(), self.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def _operation(self) -> dist.ReduceOp:
        return dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM

    def _all_reduce(self, vector: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(vector, self._operation(), group)
        return vector


def done(vector: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has its value already, for DDP's communication hooks."""
    future = torch.futures.Future(devices=[vector.device] if vector.is_cuda else [])
    future.set_result(vector)
    return future
