"""Time of a collective over the links between GPUs, by the alpha-beta model.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from multigpu.vgpu.sim.presets import Link


def ring_seconds(name: str, nbytes: int, ranks: int, link: Link) -> float:
    """The time of one collective over a ring of n ranks: alpha = the link's latency, beta = 1 / its bandwidth.

    all-reduce                             2 (n−1) (alpha + bytes/n · beta), bytes: the tensor
    broadcast, reduce                      (n−1) alpha + bytes · beta, bytes: the tensor, sent on in pieces
    all-gather, reduce-scatter, all-to-all (n−1) (alpha + bytes/n · beta), bytes: all ranks' pieces together
    """
    if ranks == 1:
        return 0.0
    if name in ("broadcast", "reduce"):
        return (ranks - 1) * link.latency + nbytes / link.bandwidth
    rounds = 2 * (ranks - 1) if name.startswith("allreduce") else ranks - 1
    return rounds * (link.latency + nbytes / ranks / link.bandwidth)
