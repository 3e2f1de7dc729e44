"""Can ranks that talk to two neighbours only, in bytes, stay together? Yes, if each remembers what the others know of it.

Bagua's low-precision decentralized SGD. The ranks form a ring. w is what the neighbours believe this rank's weights to be;
L and R are what this rank believes of its left and right neighbours'. After a step, with x the new weights,

    d = x + (L + R)/3 − 5w/3,

quantised, goes to both neighbours. L, R and w each add what its owner has sent, and x becomes w. Without the rounding that
is (L + R + w)/3 and the step x − w on top. (Tang et al., "Communication Compression for Decentralized Training", 2018.)
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from multigpu.strategies.bagua.quantise import compress, expand
from multigpu.strategies.bagua.steps import Steps
from multigpu.strategies.weights import Weights, ranks, same_start, swap


class LowPrecisionDecentralized:
    """2(N + 8) bytes a step and rank, for N weights of any floating-point type, however many ranks there are.

    A step's rounding moves the mean over the ranks by at most the mean of the ranges of d, divided by 510. Two ranks are
    each other's left and right neighbour: each message goes twice. With several optimizers, each one's step is followed by an
    exchange. Buffers stay each rank's own; all start from rank 0's.
    """

    def __init__(self) -> None:
        self.steps: Steps | None = None

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """The model itself, with hooks."""
        if ranks(group) == 1:
            return model
        same_start(model, group)
        self.group, self.weights = group, Weights(model)
        # All start from the same weights, so that each knows the others' exactly: one vector a device and type.
        self.left, self.right, self.own = (
            self.weights.copy(),
            self.weights.copy(),
            self.weights.copy(),
        )
        self.steps = Steps(model, optimizers, after=self._exchange, given_up=self._exchange)
        return model

    def detach(self) -> None:
        """Take the hooks off."""
        if self.steps is not None:
            self.steps.close()

    close = detach

    def _exchange(self) -> None:
        for x, left, right, own in zip(
            self.weights.copy(), self.left, self.right, self.own, strict=True
        ):
            message = compress(x + (left + right) / 3 - own * (5 / 3))
            from_left, from_right = self._swap(message)
            for belief, news in ((left, from_left), (right, from_right), (own, message)):
                belief += expand(
                    news, belief.dtype
                )  # the same bytes added to the same numbers, on either side
        self.weights.write(self.own)

    def _swap(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the message to both neighbours: theirs, the left one's first."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        neighbours = ((rank - 1) % size, (rank + 1) % size)
        from_left, from_right = torch.empty_like(message), torch.empty_like(message)
        incoming = zip((from_left, from_right), neighbours, strict=True)
        for work in swap(
            [(message, news, neighbour) for news, neighbour in incoming], self.group
        ):
            work.wait()
        return from_left, from_right
