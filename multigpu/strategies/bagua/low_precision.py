"""low_precision_decentralized: ranks send bytes to two neighbours only (Bagua's algorithm).

The ranks form a ring. Each rank keeps w, its own weights as its neighbours know them, and L
and R, the weights of its left and right neighbour as it knows them. After a step
with the new weights x, the rank quantises

    d = x + (L + R)/3 − 5w/3

and sends it to both neighbours. It adds its own message to w, the left neighbour's message to
L, and the right neighbour's message to R. Then w becomes the weights. Without rounding, the
new w is the average (L + R + w)/3 of the old values plus the step x − w. (Tang et al.,
"Communication Compression for Decentralized Training", 2018.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from multigpu.strategies.bagua.base import Algorithm, Wrap
from multigpu.strategies.bagua.quantise import compress, decompress
from multigpu.strategies.bagua.step_hooks import StepHooks
from multigpu.strategies.bagua.swap import swap
from multigpu.strategies.bagua.weights import Weights, broadcast_model
from multigpu.strategies.ranks import num_ranks


class LowPrecisionDecentralized(Algorithm):
    """Ranks send their quantised changes to two neighbours.

    A rank sends 2(N + 8) bytes per step for N floating-point weights, for any number of ranks.
    The rounding of a step moves the mean over the ranks by at most the mean of the ranges of
    d, divided by 510. If there are two ranks, each is the left and the right neighbour of the
    other, so each message is sent twice. If there are several optimizers, an exchange follows
    the step of each optimizer. Buffers are not averaged; all ranks start from rank 0's.
    """

    def __init__(self) -> None:
        self.step_hooks: StepHooks | None = None

    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        if num_ranks() == 1:
            return model
        broadcast_model(model)
        self.weights = Weights(model)
        # All ranks start from the same weights, so each knows its neighbours' weights exactly.
        self.left = self.weights.copy()
        self.right = self.weights.copy()
        self.own = self.weights.copy()
        self.step_hooks = StepHooks(
            model, optimizers, after=self._after_step, skipped=self._after_step
        )
        return model

    def detach(self) -> None:
        """Remove the hooks."""
        if self.step_hooks is not None:
            self.step_hooks.close()

    def _after_step(self) -> None:
        self._exchange(self.weights.copy())
        self.weights.write(self.own)

    def _exchange(self, vectors: list[torch.Tensor]) -> None:
        """Send the changes to the neighbours, and update the three copies."""
        for x, left, right, own in zip(vectors, self.left, self.right, self.own, strict=True):
            message = compress(x + (left + right) / 3 - own * (5 / 3))
            from_left, from_right = self._swap(message)
            # Both sides add the same bytes to the same numbers, so the copies stay equal.
            left += decompress(from_left, left.dtype)
            right += decompress(from_right, right.dtype)
            own += decompress(message, own.dtype)

    def _swap(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the message to both neighbours. Returns (left message, right message)."""
        rank = dist.get_rank()
        size = num_ranks()
        from_left = torch.empty_like(message)
        from_right = torch.empty_like(message)
        messages = [
            (message, from_left, (rank - 1) % size),
            (message, from_right, (rank + 1) % size),
        ]
        for work in swap(messages):
            work.wait()
        return from_left, from_right
