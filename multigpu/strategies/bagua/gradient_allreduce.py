"""gradient_allreduce: all ranks average their gradients during backward, in plain DDP."""

from torch import nn

from multigpu.strategies.bagua.base import Algorithm, Target


class GradientAllReduce(Algorithm):
    """DDP. A rank sends 8N(n−1)/n bytes per step, for N float32 parameters and n ranks."""

    def _attach(self, target: Target) -> nn.Module:
        return target.wrap(target.model)
