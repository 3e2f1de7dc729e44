"""How are gradients averaged with a quarter of the bytes? Each number travels as one byte: Bagua's ByteGrad.

Each of n ranks owns a chunk of the vector. (1) Every rank quantises its n chunks and sends each to its owner (all-to-all).
(2) The owner averages what came, and quantises the mean. (3) All gather the means. That is 2(n−1)(N/n+8) bytes a rank for
N numbers, where float32 takes 8N(n−1)/n. The error is at most (mean of the ranks' ranges + range of the mean) / 510.

The owner, too, uses what its message says and not the mean that it was made from: so all ranks end with the same bits.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.strategies.bagua.quantise import compress, expand


class Exchange:
    """One vector's way: made, it starts the all-to-all; `gather` starts the all-gather; `finish` gives the mean."""

    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup | None):
        self.flat, self.group, self.ranks = flat, group, dist.get_world_size(group)
        missing = -len(flat) % self.ranks
        # Filled up with the last number, not with 0: the range of the last chunk stays what it was.
        padded = torch.cat([flat, flat[-1:].expand(missing)]) if missing else flat
        message = compress(padded.view(self.ranks, -1))
        self.messages = torch.empty_like(message)
        self.work = dist.all_to_all_single(self.messages, message, group=group, async_op=True)

    def gather(self) -> None:
        self.work.wait()
        wide = torch.promote_types(self.flat.dtype, torch.float32)
        mean = compress(expand(self.messages, wide).mean(dim=0))
        self.messages = torch.empty_like(self.messages)
        self.work = dist.all_gather(
            list(self.messages.unbind()), mean, group=self.group, async_op=True
        )

    def finish(self) -> torch.Tensor:
        self.work.wait()
        return expand(self.messages, self.flat.dtype).flatten()[: len(self.flat)]


def byte_mean(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """(N,) → (N,): the ranks' mean, by way of bytes, the same bits on all ranks. A collective; one rank alone: `flat`."""
    if dist.get_world_size(group) == 1 or not len(flat):
        return flat
    exchange = Exchange(flat, group)
    exchange.gather()
    return exchange.finish()


class ByteHook:
    """DDP's bucket hook that does byte_mean, beside the backward of the layers before.

    When bucket k is full, its all-to-all starts, and then bucket k−1's all-gather: each all-to-all has the time in which the
    next bucket fills. The last bucket's own exchange has nothing to hide behind. The order of the calls is the same on
    all ranks, since DDP's order of the buckets is; started from callbacks, it would not be.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.running: list[tuple[torch.futures.Future[torch.Tensor], Exchange]] = []

    def hook(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        future = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
        if dist.get_world_size(self.group) == 1:
            future.set_result(flat)
            return future
        if bucket.index() == 0:
            self.running = []  # what a backward that raised has left
        self.running.append((future, Exchange(flat, self.group)))
        if len(self.running) > 1:
            self.running[-2][1].gather()
        if bucket.is_last():
            self.running[-1][1].gather()
            for waiting, exchange in self.running:
                waiting.set_result(exchange.finish())
            self.running = []
        return future


class ByteGrad:
    """DDP whose gradients travel as bytes."""

    def __init__(self, hierarchical: bool = False):
        if hierarchical:
            raise UserError(
                "ByteGrad(hierarchical=True) is not here: leave it out, and all ranks take part, whatever their node."
            )

    def attach(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        group: dist.ProcessGroup | None = None,
    ) -> nn.Module:
        """The model in DDP, which gives all ranks rank 0's weights and buffers, and has the hook."""
        wrapped = wrap(model)
        wrapped.register_comm_hook(None, ByteHook(wrapped.process_group).hook)
        return wrapped

    def detach(self) -> None:
        """Nothing hangs on the model but DDP."""

    close = detach
