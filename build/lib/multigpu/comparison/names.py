"""Lesson 10's strategies: their names, which are exact, and settings for a short run."""

from multigpu import launch
from multigpu.strategies import (
    ALGORITHMS,
    BaguaStrategy,
    PipelineStrategy,
    Strategy,
    strategy_by_name,
)
from multigpu.strategies.costs import ONE_PROCESS

NAMES = (
    "dp",
    "pipeline",
    "ddp_spawn",
    "ddp",
    "horovod",
    *(f"bagua:{name}" for name in ALGORITHMS),
    "ddp2",
)
# These learn what one process learns, except for rounding.
EXACT = ("dp", "pipeline", "ddp_spawn", "ddp", "horovod", "bagua:gradient_allreduce", "ddp2")
NO_LAUNCHER = (*ONE_PROCESS, "ddp_spawn")  # these need one process, or start their own


def strategy_for_short_run(name: str) -> Strategy:
    """Return the strategy with this name, with settings for a short run.

    bagua:async averages every 10 ms. pipeline has 2 micro-batches.
    """
    if name == "bagua:async":
        return BaguaStrategy("async", sync_interval_ms=10)
    return PipelineStrategy(micro_batches=2) if name == "pipeline" else strategy_by_name(name)


def devices_of(name: str, ranks: int) -> int | str:
    """The Trainer's `devices` for this strategy in this process, in a run of `ranks` ranks."""
    if name in ("pipeline", "ddp2"):
        return 2
    if name in ("dp", "ddp_spawn") and launch.find_world().size == 1:
        return ranks
    return "auto"
