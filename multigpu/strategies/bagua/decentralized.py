"""decentralized: ranks average their weights, not their gradients (Bagua's algorithm).

At the first forward of a step the exchange of the weights starts. It overlaps forward and
backward, in which each rank computes the gradient of its own batch at its own weights. Just
before `optimizer.step()` the average replaces the weights, and the step then applies the local
gradient to the average. If all ranks average in every step, their weights differ by what one
step has added. (Lian et al., "Can Decentralized Algorithms Outperform Centralized
Algorithms?", 2017.)
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.bagua.base import Algorithm, Wrap
from multigpu.strategies.bagua.step_hooks import StepHooks
from multigpu.strategies.bagua.swap import swap
from multigpu.strategies.bagua.weights import Weights, broadcast_model
from multigpu.strategies.ranks import num_ranks

MODES = ("all", "shift_one")


def peer(rank: int, exchange: int, size: int) -> int:
    """The peer of `rank` in exchange number 0, 1, …: a rank of the other half.

    In size / 2 exchanges every rank of the other half is the peer once. `size` must be even.
    """
    half = size // 2
    if rank < half:
        return (exchange + rank) % half + half
    return (rank - half - exchange) % half


class Decentralized(Algorithm):
    """Averages all floating-point weights over all ranks ("all") or with a peer ("shift_one").

    A rank sends 8N(n−1)/n bytes ("all") or 4N bytes ("shift_one") per step for N float32
    weights. Buffers, such as a batch norm's running means, are not averaged; all ranks start
    from rank 0's buffers.
    If there are several optimizers, each call of an optimizer's `step` is a step with its own
    exchange. All ranks must make the same number of steps. A rank that skips a step still
    makes the exchange of that step (see StepHooks).
    """

    def __init__(self, *, peer_selection_mode: str = "all"):
        if peer_selection_mode not in MODES:
            raise UserError(
                f"peer_selection_mode {peer_selection_mode!r}: "
                f"expected {' or '.join(map(repr, MODES))}."
            )
        self.mode = peer_selection_mode
        self.step_hooks: StepHooks | None = None
        self.exchanges = 0
        # The works, the vector, and the peer's vector, which is None in mode "all".
        self.running: list[tuple[list[dist.Work], torch.Tensor, torch.Tensor | None]] = []

    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        """Raises UserError for "shift_one" with an odd number of ranks."""
        self.exchanges = 0
        size = num_ranks()
        if size == 1:
            return model
        if self.mode == "shift_one" and size % 2:
            raise UserError(
                f"'shift_one' pairs the ranks, and {size} is odd: "
                f"start {size - 1} or {size + 1} ranks, or use 'all'."
            )
        broadcast_model(model)
        self.weights = Weights(model)
        self.step_hooks = StepHooks(
            model,
            optimizers,
            begin=self._begin,
            before=self._finish,
            skipped=self._finish,
        )
        return model

    def close(self) -> None:
        """Finish a running exchange, and remove the hooks."""
        self._finish()
        self.detach()

    def detach(self) -> None:
        """Remove the hooks, and drop a running exchange."""
        self.running = []
        if self.step_hooks is not None:
            self.step_hooks.close()

    def _begin(self) -> None:
        self.running = [self._start(vector) for vector in self.weights.copy()]
        self.exchanges += 1

    def _start(
        self, vector: torch.Tensor
    ) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor | None]:
        if self.mode == "all":
            work = dist.all_reduce(vector, dist.ReduceOp.AVG, async_op=True)
            return [work], vector, None
        received = torch.empty_like(vector)
        other = peer(dist.get_rank(), self.exchanges, num_ranks())
        return swap([(vector, received, other)]), vector, received

    def _finish(self) -> None:
        """Wait for the running exchange, if there is one, and write the average."""
        if not self.running:
            return
        averages = []
        for works, vector, received in self.running:
            for work in works:
                work.wait()
            averages.append(vector if received is None else (vector + received) / 2)
        self.weights.write(averages)
        self.running = []
