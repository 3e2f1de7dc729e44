"""Formulas for the bytes that each strategy sends, for N float32 weights and n ranks.

    operation                                    bytes per step and rank
    ring all-reduce                              8N(n−1)/n: 2(n−1) sends of N/n numbers
    exchange with one other rank                 4N
    one byte per weight, to two neighbours       2(N + 8): 8 for a message's min and max
    one byte per weight, through chunk owners    2(n−1)(N/n + 8)

The transport adds its own bytes: gloo puts a header before each message.
"""

from multigpu.strategies.bagua import BaguaStrategy
from multigpu.strategies.base import Strategy
from multigpu.strategies.pipeline import PipelineStrategy
from multigpu.strategies.registry import strategy_by_name

ONE_PROCESS = ("dp", "pipeline")


def predicted_bytes(name: str, weights: int, ranks: int) -> float:
    """The bytes that one rank sends through the network per step.

    For bagua:async the result is per averaging round. For bagua:qadam it is per step after the
    warm-up. For ddp2, `ranks` is the number of nodes. `name` is a name that
    `strategy_for_short_run` accepts.
    """
    if ranks == 1 or name in ONE_PROCESS:
        return 0.0
    if name in ("bagua:bytegrad", "bagua:qadam"):
        return 2.0 * (ranks - 1) * (-(-weights // ranks) + 8)
    if name == "bagua:low_precision_decentralized":
        return 2.0 * (weights + 8)
    if name.endswith(":shift_one"):
        return 4.0 * weights
    return 8 * weights * (ranks - 1) / ranks


def strategy_for_short_run(name: str) -> Strategy:
    """Return the strategy with this name, with settings for a short run.

    bagua:async averages every 10 ms. pipeline has 2 micro-batches.
    """
    if name == "bagua:async":
        return BaguaStrategy("async", sync_interval_ms=10)
    return PipelineStrategy(micro_batches=2) if name == "pipeline" else strategy_by_name(name)
