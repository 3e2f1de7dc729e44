"""How do tensors of all ranks come together, with gradients or without?"""

from typing import Any

import torch
import torch.distributed as dist


def stacked(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The ranks' tensors of one shape: (ranks, …). Without gradients."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.stack(parts)


class Gather(torch.autograd.Function):
    """`stacked`, through which gradients flow: each rank's loss depends on all ranks' tensors.

    So a tensor's gradient is the sum over the ranks of what each says of it, as with torch.distributed.nn's all_gather,
    which is not imported here: it keeps a group alive (see launch.end_gloo).
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return stacked(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
