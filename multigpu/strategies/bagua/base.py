"""The interface of an algorithm: what `attach` gets, and how it ends."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@dataclass(frozen=True)
class Target:
    """What an algorithm is attached to.

    model        the model, on its device
    optimizers   the optimizers of its parameters
    wrap         puts a model into DistributedDataParallel
    group        the ranks that communicate; None: all
    """

    model: nn.Module
    optimizers: list[Optimizer]
    wrap: Callable[[nn.Module], DistributedDataParallel]
    group: dist.ProcessGroup | None = None


class Algorithm(ABC):
    """An algorithm: what the ranks exchange, and when.

    ranks_step_together   as Strategy.ranks_step_together
    """

    ranks_step_together = True

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """Return the module to call instead of `model`: DDP, or the model itself with hooks.

        All ranks start from the weights and buffers of the group's rank 0. All ranks must call
        it.
        """
        return self._attach(Target(model, optimizers, wrap, group))

    @abstractmethod
    def _attach(self, target: Target) -> nn.Module: ...

    def close(self) -> None:
        """End on all ranks: finish pending communication, and remove the hooks."""
        self.detach()

    def detach(self) -> None:  # noqa: B027
        """Remove the hooks, without waiting for other ranks. By default there are no hooks."""
