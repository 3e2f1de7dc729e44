"""All strategies side by side: one run with each, for lesson 10's scripts."""

from multigpu.comparison.names import EXACT, NAMES, strategy_for_short_run
from multigpu.comparison.pictures import bytes_picture, consensus_picture, link_picture
from multigpu.comparison.record import Record, bytes_per_round, flat_weights
from multigpu.comparison.run import parser, run

__all__ = [
    "EXACT",
    "NAMES",
    "Record",
    "bytes_per_round",
    "bytes_picture",
    "consensus_picture",
    "flat_weights",
    "link_picture",
    "parser",
    "run",
    "strategy_for_short_run",
]
