"""The strategies: how one or several devices train a model, with or without the Trainer.

They differ in what the ranks send to each other, and when.
"""

from multigpu.strategies.bagua import ALGORITHMS, BaguaStrategy, QAdamOptimizer
from multigpu.strategies.base import Strategy
from multigpu.strategies.ddp import DDPStrategy
from multigpu.strategies.ddp2 import DDP2Strategy
from multigpu.strategies.dp import DataParallelStrategy
from multigpu.strategies.horovod.strategy import HorovodStrategy
from multigpu.strategies.pipeline import PipelineStrategy
from multigpu.strategies.registry import STRATEGIES, strategy_by_name
from multigpu.strategies.single import SingleDeviceStrategy
from multigpu.strategies.spawn import DDPNotebookStrategy, DDPSpawnStrategy

__all__ = [
    "ALGORITHMS",
    "STRATEGIES",
    "BaguaStrategy",
    "DDP2Strategy",
    "DDPNotebookStrategy",
    "DDPSpawnStrategy",
    "DDPStrategy",
    "DataParallelStrategy",
    "HorovodStrategy",
    "PipelineStrategy",
    "QAdamOptimizer",
    "SingleDeviceStrategy",
    "Strategy",
    "strategy_by_name",
]
