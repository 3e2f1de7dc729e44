"""The interface of an algorithm: how it is attached to a model, and how it ends."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Wrap = Callable[[nn.Module], DistributedDataParallel]


class Algorithm(ABC):
    """An algorithm: what the ranks exchange, and when.

    ranks_step_together   as Strategy.ranks_step_together
    """

    ranks_step_together = True

    @abstractmethod
    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        """Return the module to call instead of `model`: `wrap(model)`, or the model itself.

        The model is on its device, and the optimizers have its parameters. All ranks start
        from the weights and buffers of rank 0. All ranks must call it.
        """

    def close(self) -> None:
        """End on all ranks: finish pending communication, and remove the hooks."""
        self.detach()

    def detach(self) -> None:  # noqa: B027
        """Remove the hooks, without waiting for other ranks. By default there are no hooks."""
