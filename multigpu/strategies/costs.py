"""How many bytes does a strategy send? The formulas, for N float32 weights and n ranks.

    what                                    bytes a step and rank
    all-reduce in a ring                    8N(n−1)/n: each of n pieces goes round twice, but for one hop
    a swap with one other rank              4N
    one byte a weight, to two neighbours    2(N + 8): 8 for the message's smallest and largest number
    one byte a weight, by way of owners     2(n−1)(N/n + 8)

What carries the bytes adds its own: gloo a header to each message.
"""

from multigpu.strategies.bagua.strategy import BaguaStrategy
from multigpu.strategies.base import Strategy
from multigpu.strategies.pipeline import PipelineStrategy
from multigpu.strategies.registry import named

ONE_PROCESS = ("dp", "pipeline")


def predicted(name: str, weights: int, ranks: int) -> float:
    """Bytes that a rank sends through the network in a step; for bagua:async in a sync, for bagua:qadam after the warm-up.

    `name` is what `by_name` takes; for ddp2 `ranks` are nodes.
    """
    if ranks == 1 or name in ONE_PROCESS:
        return 0.0
    if name in ("bagua:bytegrad", "bagua:qadam"):
        return 2.0 * (ranks - 1) * (-(-weights // ranks) + 8)
    if name == "bagua:low_precision_decentralized":
        return 2.0 * (weights + 8)
    return 4.0 * weights if name.endswith(":shift_one") else 8 * weights * (ranks - 1) / ranks


def by_name(name: str) -> Strategy:
    """The strategy of that name, made to show much in a short run: async syncs every 10 ms, pipeline has 2 micro-batches."""
    if name == "bagua:async":
        return BaguaStrategy("async", sync_interval_ms=10)
    return PipelineStrategy(micro_batches=2) if name == "pipeline" else named(name)
