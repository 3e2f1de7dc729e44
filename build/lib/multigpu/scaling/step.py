"""One step of DDP on n GPUs: backward, and behind it the all-reduces of the buckets.

The all-reduces are on a stream of their own, one after the other. Each starts when its bucket
is full and the one before it has ended. When backward has ended, the averages of each bucket
are copied out as soon as its all-reduce has ended; then the optimizer makes its step. Source:
Li et al., "PyTorch Distributed", VLDB 2020, sections 3.2 and 4.2.

An all-reduce does not slow the computation down here. On a GPU it uses some of the
multiprocessors and of the memory's bandwidth.
"""

from collections.abc import Callable
from dataclasses import dataclass

from multigpu.scaling.buckets import buckets
from multigpu.scaling.compute import Compute


@dataclass(frozen=True)
class Step:
    """A step of one rank, in seconds.

    seconds   of the whole step
    compute   what the GPU computes: forward, backward, the copies and the optimizer's step
    network   of all all-reduces
    """

    seconds: float
    compute: float
    network: float


def ddp_step(
    compute: Compute, all_reduce: Callable[[int], float], slowdown: float = 1.0
) -> Step:
    """The step, if `all_reduce(nbytes)` is the seconds of one all-reduce.

    `slowdown` multiplies the times of the computation, as the slowest rank does.
    """
    gradients = compute.gradients
    network_free = 0.0
    network = 0.0
    ends = []
    full = buckets(gradient.nbytes for gradient in gradients)
    for bucket in full:
        ready = compute.forward + max(gradients[number].ready for number in bucket)
        seconds = all_reduce(sum(gradients[number].nbytes for number in bucket))
        network_free = max(network_free, slowdown * ready) + seconds
        network += seconds
        ends.append(network_free)
    now = slowdown * (compute.forward + compute.backward)
    for bucket, end in zip(full, ends, strict=True):
        copies = sum(gradients[number].copy_out for number in bucket)
        now = max(now, end) + slowdown * copies
    now += slowdown * compute.update
    return Step(now, slowdown * (compute.alone + compute.copies), network)
