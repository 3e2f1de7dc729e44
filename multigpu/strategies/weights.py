"""How do a model's weights travel? As one vector for each device and type, in the order of the parameters."""

import torch
import torch.distributed as dist
from torch import nn


def ranks(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks; 1 where torch.distributed was not started."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def swap(
    messages: list[tuple[torch.Tensor, torch.Tensor, int]],
    group: dist.ProcessGroup | None = None,
) -> list[dist.Work]:
    """Start to send and to receive: (what goes out, where what comes in is put, the peer's rank in the group).

    The receives are asked for first. gloo tells the peer that it may send on the same connection that carries the own
    data: behind them, the word would arrive when they all have, and the two ways would be used one after the other
    (measured over 100 Mbit/s with torch 2.13: 81 ms for 46, benchmarks/swap.py).
    """
    calls = [(dist.irecv, theirs, peer) for _, theirs, peer in messages]
    calls += [(dist.isend, mine, peer) for mine, _, peer in messages]
    pairs = [
        dist.P2POp(call, tensor, group=group, group_peer=peer) for call, tensor, peer in calls
    ]
    return dist.batch_isend_irecv(pairs)


@torch.no_grad()
def same_start(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks the parameters and buffers of the group's rank 0. A collective."""
    if ranks(group) == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        own = tensor.detach()
        whole = own.contiguous()  # itself, if its numbers lie in order
        dist.broadcast(whole, group=group, group_src=0)
        if whole is not own:
            own.copy_(whole)


class Weights:
    """The floating-point parameters of a model as vectors, frozen ones too: they may be thawed later.

    A parameter that two layers share is there once. Buffers are not weights: each rank keeps its own.
    """

    def __init__(self, model: nn.Module):
        self.parts: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for parameter in model.parameters():
            if parameter.is_floating_point():
                self.parts.setdefault((parameter.device, parameter.dtype), []).append(
                    parameter
                )

    def copy(self) -> list[torch.Tensor]:
        """The weights now: a new vector for each device and type."""
        return [
            torch.cat([p.detach().reshape(-1) for p in part]) for part in self.parts.values()
        ]

    @torch.no_grad()
    def write(self, vectors: list[torch.Tensor]) -> None:
        """Take the numbers of `vectors`, shaped as those of `copy`."""
        for parameter, numbers in self._pairs(vectors):
            parameter.copy_(numbers)

    def add_unseen(self, vectors: list[torch.Tensor]) -> None:
        """Add `vectors` to the weights, also between a forward and its backward, where autograd would refuse it."""
        for parameter, numbers in self._pairs(vectors):
            parameter.data.add_(numbers.to(parameter.device))

    def _pairs(self, vectors: list[torch.Tensor]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        pairs = []
        for part, vector in zip(self.parts.values(), vectors, strict=True):
            pieces = vector.split([p.numel() for p in part])
            pairs += [(p, piece.view(p.shape)) for p, piece in zip(part, pieces, strict=True)]
        return pairs
