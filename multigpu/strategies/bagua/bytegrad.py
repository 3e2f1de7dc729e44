"""bytegrad: gradients are sent as bytes, a quarter of float32's size (Bagua's ByteGrad).

Each of n ranks owns one chunk of the vector. (1) Every rank quantises its n chunks and sends
each to its owner (all-to-all). (2) The owner averages what it received, and quantises the
mean. (3) All ranks gather the means (all-gather). That is 2(n−1)(N/n+8) bytes per rank for N
numbers; with float32 it is 8N(n−1)/n. The error is at most (mean of the ranks' ranges + range
of the mean) / 510.

The owner, too, uses its dequantised message instead of the exact mean, so all ranks end with
the same bits.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from multigpu.strategies.bagua.base import Algorithm, Wrap
from multigpu.strategies.bagua.quantise import compress, decompress


class Exchange:
    """Averages one vector (N,) in three steps, so several exchanges can overlap.

    The constructor starts the all-to-all, `gather` starts the all-gather, and `finish` returns
    the mean.
    """

    def __init__(self, vector: torch.Tensor):
        self.vector = vector
        ranks = dist.get_world_size()
        missing = -len(vector) % ranks
        # Padded with the last number, not with 0, so the last chunk's range stays the same.
        padded = torch.cat([vector, vector[-1:].expand(missing)]) if missing else vector
        message = compress(padded.view(ranks, -1))
        self.messages = torch.empty_like(message)
        self.work = dist.all_to_all_single(self.messages, message, async_op=True)

    def gather(self) -> None:
        """Wait for the chunks, average them, and start the all-gather of the mean."""
        self.work.wait()
        dtype = torch.promote_types(self.vector.dtype, torch.float32)
        mean = compress(decompress(self.messages, dtype).mean(dim=0))
        self.messages = torch.empty_like(self.messages)
        self.work = dist.all_gather(list(self.messages.unbind()), mean, async_op=True)

    def finish(self) -> torch.Tensor:
        """The mean (N,), in the vector's dtype."""
        self.work.wait()
        return decompress(self.messages, self.vector.dtype).flatten()[: len(self.vector)]


class ByteHook:
    """A DDP communication hook that averages buckets as bytes during backward.

    When bucket k is full, its all-to-all starts, and then bucket k−1's all-gather starts. So
    each all-to-all runs while the next bucket fills. Nothing overlaps the last bucket's
    all-gather. All ranks make these calls in the same order, because DDP has the same order of
    buckets on all ranks. Calls from callbacks would have no fixed order.
    """

    def __init__(self) -> None:
        self.running: list[tuple[torch.futures.Future[torch.Tensor], Exchange]] = []

    def hook(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """The hook for DDP's register_comm_hook. The future's value is the averaged bucket."""
        vector = bucket.buffer()
        future = torch.futures.Future(devices=[vector.device] if vector.is_cuda else [])
        if dist.get_world_size() == 1:
            future.set_result(vector)
            return future
        if bucket.index() == 0:
            # A backward that raised an error may have left unfinished exchanges.
            self.running = []
        self.running.append((future, Exchange(vector)))
        if len(self.running) > 1:
            _, previous = self.running[-2]
            previous.gather()
        if bucket.is_last():
            _, last = self.running[-1]
            last.gather()
            for pending, exchange in self.running:
                pending.set_result(exchange.finish())
            self.running = []
        return future


class ByteGrad(Algorithm):
    """DDP whose gradients are sent as bytes."""

    def attach(self, model: nn.Module, optimizers: list[Optimizer], wrap: Wrap) -> nn.Module:
        wrapped = wrap(model)
        wrapped.register_comm_hook(None, ByteHook().hook)
        return wrapped
