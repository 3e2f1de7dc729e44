"""The all-reduces of one step's gradients, in an order that is the same on all ranks.

All ranks must start their all-reduces in the same order, but autograd's order can differ
between ranks. In Horovod, all ranks report to a coordinator which gradients are ready. This
module uses a fixed order instead: the reverse of the parameters' order, which is nearly the
order of backward. A gradient waits until the all-reduces of all gradients before it have
started. Horovod also packs small gradients together. This module does not, so with many small
parameters DDP is faster.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from multigpu.errors import UserError
from multigpu.strategies.ranks import num_ranks


class Averages:
    """Starts the all-reduces as gradients become ready, and waits for them.

    parameters        the optimizer's parameters, in the same order on all ranks
    compression       returns the tensor to send, given a gradient
    passes_per_step   backward passes per step

    skip              True: `before_step` does not average the gradients
    step_hook         the hook that calls `before_step`
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        compression: Callable[[torch.Tensor], torch.Tensor],
        passes_per_step: int,
    ):
        self.compression = compression
        self.passes_per_step = passes_per_step
        self.order = [p for p in reversed(parameters) if p.requires_grad]
        self.skip = False
        self.synchronized = False
        # (the gradient, the tensor that is reduced, the work). Without compression the two
        # tensors are the same.
        self.running: list[tuple[torch.Tensor, torch.Tensor, dist.Work]] = []
        self.backward_counts: dict[torch.Tensor, int] = {}
        self.step_hook: RemovableHandle | None = None
        self.handles: list[RemovableHandle] = []
        if num_ranks() > 1:
            self.handles = [
                p.register_post_accumulate_grad_hook(self._ready) for p in self.order
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        if self.step_hook is not None:
            self.step_hook.remove()
        self.handles = []
        self.order = []

    def reset(self) -> None:
        """Begin a new step."""
        self.backward_counts = {}
        self.synchronized = False

    def _ready(self, parameter: torch.Tensor) -> None:
        self.synchronized = False
        self.backward_counts[parameter] = self.backward_counts.get(parameter, 0) + 1
        if self.backward_counts[parameter] > self.passes_per_step:
            raise UserError(
                f"backward() was called more than {self.passes_per_step} times before step(): "
                f"give DistributedOptimizer backward_passes_per_step=<the number of calls>."
            )
        while len(self.running) < len(self.order):
            following = self.order[len(self.running)]
            if self.backward_counts.get(following, 0) < self.passes_per_step:
                return
            self._start(following)

    def _start(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise UserError(
                "a sparse gradient cannot be averaged: make the embedding with sparse=False."
            )
        gradient = parameter.grad.detach()
        reduced = self.compression(gradient).contiguous()
        work = dist.all_reduce(reduced, dist.ReduceOp.AVG, async_op=True)
        self.running.append((gradient, reduced, work))

    def synchronize(self) -> None:
        """Start the all-reduces that have not started, and wait for all averages."""
        if self.synchronized:
            return
        if num_ranks() > 1:
            for parameter in self.order[len(self.running) :]:
                self._start(parameter)
        for gradient, reduced, work in self.running:
            work.wait()
            if reduced is not gradient:
                gradient.copy_(reduced)
        for parameter in self.order:
            # The parameter was frozen later. With a gradient of zeros, its momentum would
            # still move it.
            if not parameter.requires_grad:
                parameter.grad = None
        self.running = []
        self.backward_counts = {}
        self.synchronized = True

    def before_step(self) -> None:
        """Average the gradients, unless `skip_synchronize()` is in effect.

        Raises UserError if it is in effect but `synchronize()` was not called.
        """
        if self.skip:
            if self.backward_counts:
                raise UserError(
                    "skip_synchronize() without synchronize() would apply this rank's own "
                    "gradients: call synchronize() first."
                )
        else:
            if self.synchronized and self.handles:
                warnings.warn(
                    "step() after synchronize() averages the gradients again: "
                    "put step() into `with optimizer.skip_synchronize():`.",
                    stacklevel=3,
                )
                self.synchronized = False
            self.synchronize()
        self.synchronized = False
