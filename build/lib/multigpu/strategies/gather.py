"""Gathers the tensors of all ranks, with or without gradients."""

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx


def all_gather_stacked(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Stack the ranks' tensors, all of one shape, to (ranks, …), without gradients.

    All ranks must call it.
    """
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor.detach().contiguous(), group=group)
    return torch.stack(tensors)


class Gather(torch.autograd.Function):
    """`all_gather_stacked` with gradients.

    Each rank's loss depends on the tensors of all ranks. The gradient of a rank's tensor is
    therefore the sum of its gradients over all ranks' losses, as in torch.distributed.nn's
    all_gather. That module is not imported here, because it keeps the process group alive (see
    end_gloo in launch/exit.py).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: torch.Tensor, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.group = group
        return all_gather_stacked(tensor, group)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
