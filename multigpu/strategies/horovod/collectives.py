"""Horovod's collectives on tensors and objects, and the functions that use them.

The argument `name`, Horovod's key of an operation, has no effect: the ranks' operations are
matched by their order, which must be the same on all ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from multigpu import devices
from multigpu.errors import UserError
from multigpu.strategies.horovod.compression import Compression
from multigpu.strategies.horovod.process import rank, size


def allreduce(
    tensor: torch.Tensor,
    *,
    name: str | None = None,
    compression: Callable[[torch.Tensor], torch.Tensor] = Compression.none,
) -> torch.Tensor:
    """The mean of the ranks' tensors, as a new tensor. Gradients do not flow back.

    Raises UserError for integers.
    """
    if not tensor.is_floating_point():
        raise UserError(
            f"allreduce cannot average a tensor of type {tensor.dtype}: "
            f"give a floating-point tensor."
        )
    result = compression(tensor.detach()).clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.all_reduce(result, dist.ReduceOp.AVG)
    return result.to(tensor.dtype)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Overwrite the tensor with rank root_rank's. Returns the tensor."""
    if size() > 1:
        target = tensor.detach()
        buffer = target.contiguous()
        dist.broadcast(buffer, root_rank)
        if buffer is not target:
            target.copy_(buffer)
    return tensor


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Rank root_rank's object, which is pickled, on each rank."""
    objects = [obj]
    if size() > 1:
        dist.broadcast_object_list(objects, root_rank)
    return objects[0]


@torch.no_grad()
def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
    root_rank: int = 0,
) -> None:
    """Overwrite the tensors with those of rank root_rank.

    `params` is a model's state_dict(), its named_parameters() or its parameters().
    """
    if isinstance(params, Mapping):
        params = sorted(params.items())
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and the settings of rank root_rank's optimizer to all ranks.

    The other ranks' optimizers do not need a state before the call. `model`, which Horovod
    needs for sparse embeddings, is unused.
    """
    if size() == 1:
        return
    state = devices.to_cpu(optimizer.state_dict()) if rank() == root_rank else None
    # load_state_dict moves each tensor to its parameter's device.
    optimizer.load_state_dict(broadcast_object(state, root_rank))
