"""What is the plainest of Bagua's algorithms? All ranks average their gradients during backward: that is DDP."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class GradientAllReduce:
    """DDP as it is: 8N(n−1)/n bytes a step and rank, for N parameters in float32 and n ranks."""

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """The model in DDP, which gives all ranks rank 0's weights and buffers."""
        return wrap(model)

    def detach(self) -> None:
        """Nothing hangs on the model but DDP."""

    close = detach
