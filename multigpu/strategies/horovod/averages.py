"""In which order does the course's Horovod average the gradients of one step? In one that is the same on all ranks.

All ranks must start their all-reduces in one order, and autograd's may differ between ranks. Horovod has a
coordinator, which hears from all what is ready. Here the order is fixed: the parameters' own, backwards, which is about the
order of backward. A gradient is held back until those before it are out. Horovod also packs small gradients together,
which this does not: many small parameters are faster with DDP.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.strategies.weights import ranks


class Compression:
    """How a gradient travels: as it is, or in 16 bits. `compress` gives what is sent."""

    @staticmethod
    def none(gradient: torch.Tensor) -> torch.Tensor:
        return gradient

    @staticmethod
    def fp16(gradient: torch.Tensor) -> torch.Tensor:
        """Half the bytes of float32. A number above 65504 becomes infinite, also in the sum over the ranks."""
        return gradient.half() if gradient.is_floating_point() else gradient


class Averages:
    """The all-reduces of one step: who is ready, who is out, and what comes next."""

    def __init__(self, parameters: list[torch.Tensor], compression: Callable, passes: int):
        self.compression, self.passes = compression, passes
        self.order = [p for p in reversed(parameters) if p.requires_grad]
        self.skip = self.done = False
        self.running: list[tuple[torch.Tensor, torch.Tensor, dist.Work]] = []
        self.counts: dict[torch.Tensor, int] = {}
        self.handles = []
        if ranks() > 1:
            self.handles = [
                p.register_post_accumulate_grad_hook(self._ready) for p in self.order
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.order = [], []

    def forget(self) -> None:
        self.counts, self.done = {}, False

    def _ready(self, parameter: torch.Tensor) -> None:
        self.done = False
        self.counts[parameter] = self.counts.get(parameter, 0) + 1
        if self.counts[parameter] > self.passes:
            raise UserError(
                f"more than {self.passes} backward() before step(): give DistributedOptimizer "
                f"backward_passes_per_step=<the number of them>."
            )
        while len(self.running) < len(self.order):
            if self.counts.get(self.order[len(self.running)], 0) < self.passes:
                return
            self._launch(self.order[len(self.running)])

    def _launch(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise UserError(
                "a sparse gradient cannot be averaged here: make the embedding with sparse=False."
            )
        gradient = parameter.grad.detach()
        parcel = self.compression(gradient).contiguous()
        self.running.append(
            (gradient, parcel, dist.all_reduce(parcel, dist.ReduceOp.AVG, async_op=True))
        )

    def synchronize(self) -> None:
        if self.done:
            return
        if ranks() > 1:
            for parameter in self.order[len(self.running) :]:
                self._launch(parameter)
        for gradient, parcel, work in self.running:
            work.wait()
            if parcel is not gradient:
                gradient.copy_(parcel)
        for parameter in self.order:
            if (
                not parameter.requires_grad
            ):  # frozen since: zeros would move it on by its momentum
                parameter.grad = None
        self.running, self.counts, self.done = [], {}, True

    def before_step(self) -> None:
        if self.skip:
            if self.counts:
                raise UserError(
                    "skip_synchronize() without synchronize() would apply this rank's own gradients: call synchronize() first."
                )
        else:
            if self.done and self.handles:
                warnings.warn(
                    "step() after synchronize() averages the gradients again: put it into `with optimizer.skip_synchronize():`.",
                    stacklevel=3,
                )
                self.done = False
            self.synchronize()
        self.done = False
