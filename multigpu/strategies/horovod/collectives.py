"""Horovod's collectives on tensors, and the functions that use them."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from multigpu import devices
from multigpu.errors import UserError
from multigpu.strategies.horovod.process import rank, size


def allreduce(tensor: torch.Tensor, average: bool = True) -> torch.Tensor:
    """The mean over the ranks, or the sum, as a new tensor.

    Raises UserError for a mean of integers.
    """
    if average and not tensor.is_floating_point():
        raise UserError(
            f"allreduce cannot average a tensor of type {tensor.dtype}: "
            f"give average=False, or a floating-point tensor."
        )
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.all_reduce(result, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    return result


def allgather(tensor: torch.Tensor) -> torch.Tensor:
    """The ranks' tensors, concatenated on dimension 0: (Σ rows, …).

    The ranks can have different numbers of rows.
    """
    rows = torch.tensor([len(tensor)], device=tensor.device)
    lengths = [torch.empty_like(rows) for _ in range(size())]
    dist.all_gather(lengths, rows)
    counts = [int(length) for length in lengths]
    # torch's all_gather needs equal shapes: pad to the longest.
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])


def broadcast(tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
    """Rank root_rank's tensor, as a new tensor on each rank."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if size() > 1:
        dist.broadcast(result, root_rank)
    return result


@torch.no_grad()
def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Overwrite the tensors with those of rank root_rank.

    `params` is a model's state_dict() or its named_parameters().
    """
    named = params.items() if isinstance(params, Mapping) else params
    for _, tensor in sorted(named, key=lambda pair: pair[0]):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(broadcast(tensor, root_rank))


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """Copy the state and the settings of rank root_rank's optimizer to all ranks.

    The other ranks' optimizers do not need a state before the call.
    """
    if size() == 1:
        return
    state = devices.to_cpu(optimizer.state_dict()) if rank() == root_rank else None
    states = [state]
    dist.broadcast_object_list(states, root_rank)
    # load_state_dict moves each tensor to its parameter's device.
    optimizer.load_state_dict(states[0])
