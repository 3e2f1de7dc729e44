"""A model's weights as vectors, one per device and dtype, in the parameters' order."""

import torch
import torch.distributed as dist
from torch import nn

from multigpu.strategies.ranks import num_ranks


@torch.no_grad()
def broadcast_model(model: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks.

    All ranks must call it.
    """
    if num_ranks() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        detached = tensor.detach()
        # The tensor itself if it is contiguous, otherwise a copy, which is written back.
        contiguous = detached.contiguous()
        dist.broadcast(contiguous, 0)
        if contiguous is not detached:
            detached.copy_(contiguous)


class Weights:
    """A model's floating-point parameters as vectors.

    Frozen parameters are included, because they can become trainable. A parameter that two
    layers share is included once. Buffers are not included: each rank keeps its own buffers.
    """

    def __init__(self, model: nn.Module):
        self.parameters: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.is_floating_point():
                kind = (parameter.device, parameter.dtype)
                self.parameters.setdefault(kind, []).append(parameter)

    def copy(self) -> list[torch.Tensor]:
        """A copy of the current weights: one flat vector per device and dtype."""
        return [
            torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
            for parameters in self.parameters.values()
        ]

    @torch.no_grad()
    def write(self, vectors: list[torch.Tensor]) -> None:
        """Overwrite the weights with `vectors`, which have the shapes that `copy` gives."""
        for parameter, values in self._with_values(vectors):
            parameter.copy_(values)

    def add_outside_autograd(self, vectors: list[torch.Tensor]) -> None:
        """Add `vectors` to the weights, also between a forward and its backward.

        Between the two, autograd would reject a change that it can see.
        """
        for parameter, values in self._with_values(vectors):
            parameter.data.add_(values.to(parameter.device))

    def _with_values(
        self, vectors: list[torch.Tensor]
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its slice of `vectors`, reshaped like the parameter."""
        pairs = []
        for parameters, vector in zip(self.parameters.values(), vectors, strict=True):
            slices = vector.split([parameter.numel() for parameter in parameters])
            for parameter, values in zip(parameters, slices, strict=True):
                pairs.append((parameter, values.view(parameter.shape)))
        return pairs
