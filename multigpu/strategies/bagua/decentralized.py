"""What if ranks average their weights instead of their gradients? Then the exchange can run beside forward and backward.

Bagua's decentralized SGD. At a step's first forward the exchange of the weights starts. Meanwhile each rank computes the
gradient of its own batch at its own weights. Just before `optimizer.step()` the average is copied in, and the local
gradient is applied to it. The ranks' weights differ by what one step has added.
(Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017.)
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.bagua.steps import Steps
from multigpu.strategies.weights import Weights, ranks, same_start, swap

MODES = ("all", "shift_one")


def peer(rank: int, exchange: int, size: int) -> int:
    """With whom `rank` swaps at the exchange of this number, 0, 1, …: one of the lower half with one of the upper half.

    In size / 2 exchanges each meets all of the other half. `size` is even.
    """
    half = size // 2
    return (exchange + rank) % half + half if rank < half else (rank - half - exchange) % half


class Decentralized:
    """All floating-point weights are averaged, over all ranks ("all") or with one other ("shift_one").

    Bytes a rank sends in an exchange of N float32 weights: 8N(n−1)/n, or 4N. There is one exchange in
    `communication_interval` steps. Buffers, as the running means of a batch norm, stay each rank's own; all start from
    rank 0's. The ranks make the same number of steps; one that gives up a step stays in pace, see Steps.
    """

    def __init__(self, peer_selection_mode: str = "all", communication_interval: int = 1):
        if peer_selection_mode not in MODES:
            raise UserError(
                f"peer_selection_mode {peer_selection_mode!r}: there are {' and '.join(map(repr, MODES))}."
            )
        if communication_interval < 1:
            raise UserError(
                f"communication_interval is {communication_interval}: it is a number of steps, 1 or more."
            )
        self.mode, self.interval = peer_selection_mode, communication_interval
        self.steps: Steps | None = None
        self.begun = self.exchanges = 0
        self.running: list[tuple[list[dist.Work], torch.Tensor, torch.Tensor | None]] = []

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """The model itself, with hooks. Raises UserError for "shift_one" and an odd number of ranks."""
        size = ranks(group)
        if size == 1:
            return model
        if self.mode == "shift_one" and size % 2:
            raise UserError(
                f"'shift_one' pairs the ranks, and {size} is odd: start {size - 1} or {size + 1} ranks, or take 'all'."
            )
        same_start(model, group)
        self.group, self.weights = group, Weights(model)
        self.steps = Steps(
            model, optimizers, begin=self._begin, before=self._finish, given_up=self._finish
        )
        return model

    def close(self) -> None:
        """Finish the exchange that is under way, and take the hooks off."""
        self._finish()
        self.detach()

    def detach(self) -> None:
        """Take the hooks off. An exchange that is under way is given up."""
        self.running = []
        if self.steps is not None:
            self.steps.close()

    def _begin(self) -> None:
        if self.begun % self.interval == 0:
            self.running = [self._start(vector) for vector in self.weights.copy()]
            self.exchanges += 1
        self.begun += 1

    def _start(
        self, mine: torch.Tensor
    ) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor | None]:
        if self.mode == "all":
            return (
                [dist.all_reduce(mine, dist.ReduceOp.AVG, self.group, async_op=True)],
                mine,
                None,
            )
        theirs = torch.empty_like(mine)
        other = peer(
            dist.get_rank(self.group), self.exchanges, dist.get_world_size(self.group)
        )
        return swap([(mine, theirs, other)], self.group), mine, theirs

    def _finish(self) -> None:
        """Wait for the exchange, and take the average. Without one under way: nothing."""
        if not self.running:
            return
        averages = []
        for works, mine, theirs in self.running:
            for work in works:
                work.wait()
            averages.append(mine if theirs is None else (mine + theirs) / 2)
        self.weights.write(averages)
        self.running = []
