"""low_precision_decentralized: ranks send bytes to two neighbours only: Bagua's algorithm.

The ranks form a ring. w is this rank's weights as its neighbours know them; L and R are the
left and right neighbour's weights as this rank knows them. After a step, with x the new
weights,

    d = x + (L + R)/3 − 5w/3

is quantised and sent to both neighbours. L, R and w each add the message of the rank to which
they belong, and w becomes the weights. Without the rounding that is the average (L + R + w)/3
plus the step x − w. (Tang et al., "Communication Compression for Decentralized Training",
2018.)
"""

import torch
import torch.distributed as dist
from torch import nn

from multigpu.strategies.bagua.base import Algorithm, Target
from multigpu.strategies.bagua.quantise import compress, decompress
from multigpu.strategies.bagua.step_hooks import StepHooks
from multigpu.strategies.weights import Weights, broadcast_model, num_ranks, swap


class LowPrecisionDecentralized(Algorithm):
    """2(N + 8) bytes per step and rank for N floating-point weights, for any number of ranks.

    The rounding of a step moves the mean over the ranks by at most the mean of the ranges of
    d, divided by 510. With two ranks each is the other's left and right neighbour, so each
    message is sent twice. With several optimizers, an exchange follows each one's step.
    Buffers stay different between ranks; all start from rank 0's.
    """

    def __init__(self) -> None:
        self.step_hooks: StepHooks | None = None

    def _attach(self, target: Target) -> nn.Module:
        model = target.model
        if num_ranks(target.group) == 1:
            return model
        broadcast_model(model, target.group)
        self.group = target.group
        self.weights = Weights(model)
        # All start from the same weights, so each rank knows its neighbours' exactly.
        self.left = self.weights.copy()
        self.right = self.weights.copy()
        self.own = self.weights.copy()
        self.step_hooks = StepHooks(
            model, target.optimizers, after=self._exchange, skipped=self._exchange
        )
        return model

    def detach(self) -> None:
        """Remove the hooks."""
        if self.step_hooks is not None:
            self.step_hooks.close()

    def _exchange(self) -> None:
        for x, left, right, own in zip(
            self.weights.copy(), self.left, self.right, self.own, strict=True
        ):
            message = compress(x + (left + right) / 3 - own * (5 / 3))
            from_left, from_right = self._swap(message)
            # Both sides add the same bytes to the same numbers, so the copies stay equal.
            left += decompress(from_left, left.dtype)
            right += decompress(from_right, right.dtype)
            own += decompress(message, own.dtype)
        self.weights.write(self.own)

    def _swap(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the message to both neighbours; returns (the left one's, the right one's)."""
        rank = dist.get_rank(self.group)
        size = dist.get_world_size(self.group)
        from_left = torch.empty_like(message)
        from_right = torch.empty_like(message)
        messages = [
            (message, from_left, (rank - 1) % size),
            (message, from_right, (rank + 1) % size),
        ]
        for work in swap(messages, self.group):
            work.wait()
        return from_left, from_right
