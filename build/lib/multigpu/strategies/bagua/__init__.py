"""Bagua's algorithms (https://github.com/BaguaSys/bagua), which BaguaStrategy uses by name."""

from multigpu.strategies.bagua.qadam import QAdamOptimizer
from multigpu.strategies.bagua.strategy import ALGORITHMS, BaguaStrategy

__all__ = ["ALGORITHMS", "BaguaStrategy", "QAdamOptimizer"]
