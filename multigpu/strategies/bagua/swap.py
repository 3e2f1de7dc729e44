"""Messages between pairs of ranks, in both directions at once."""

import torch
import torch.distributed as dist


def swap(messages: list[tuple[torch.Tensor, torch.Tensor, int]]) -> list[dist.Work]:
    """Start the sends and receives of all messages.

    A message is (tensor to send, tensor to receive into, peer's rank). The receives are
    posted first, because gloo notifies the peer of a posted receive over the connection that
    also carries the data. After the data of a send, the notice would arrive late. The two
    directions would then be used one after the other (81 ms instead of 46, measured over
    100 Mbit/s with torch 2.13 by benchmarks/swap.py).
    """
    operations = [dist.P2POp(dist.irecv, received, peer) for _, received, peer in messages]
    operations += [dist.P2POp(dist.isend, sent, peer) for sent, _, peer in messages]
    return dist.batch_isend_irecv(operations)
