"""Times of transfers and collectives over the links between GPUs, by the alpha-beta model.

    seconds = alpha + bytes · beta        alpha: the link's latency in seconds,
                                          beta: 1 / the link's bandwidth in bytes/s

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", International Journal of High Performance Computing Applications 19(1), 2005.
"""

from multigpu.vgpu.sim.presets import Link


def transfer_seconds(nbytes: float, link: Link) -> float:
    """Seconds of one copy of `nbytes` bytes over the link: alpha + bytes · beta."""
    return link.latency + nbytes / link.bandwidth


def ring_seconds(name: str, nbytes: int, ranks: int, link: Link) -> float:
    """Seconds of one collective over a ring of n ranks that are joined by `link`.

    name                                   seconds
    allreduce                              2 (n−1) (alpha + bytes/n · beta)
    broadcast, reduce                      (n−1) alpha + bytes · beta
    allgather, reduce_scatter, alltoall    (n−1) (alpha + bytes/n · beta)

    For allreduce, broadcast, reduce and alltoall, `nbytes` is the size of one rank's tensor;
    for allgather and reduce_scatter it is the size of all ranks' chunks together. Broadcast
    pipelines the tensor in chunks.
    """
    if ranks == 1:
        return 0.0
    if name in ("broadcast", "reduce"):
        return (ranks - 1) * link.latency + nbytes / link.bandwidth
    rounds = 2 * (ranks - 1) if name == "allreduce" else ranks - 1
    return rounds * transfer_seconds(nbytes / ranks, link)
