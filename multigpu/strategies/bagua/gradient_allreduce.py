"""gradient_allreduce: all ranks average their gradients during backward, in plain DDP."""

from torch import nn
from torch.optim import Optimizer

from multigpu.strategies.bagua.base import Algorithm, Wrap


class GradientAllReduce(Algorithm):
    """DDP. A rank sends 8N(n−1)/n bytes per step, for N float32 parameters and n ranks."""

    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        return wrap(model)
