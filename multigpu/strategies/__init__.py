"""Every strategy that people read about, with and without the Trainer: what moves between the ranks, and when."""

from multigpu.strategies.bagua.qadam import QAdamOptimizer
from multigpu.strategies.bagua.strategy import ALGORITHMS, BaguaStrategy
from multigpu.strategies.base import Strategy
from multigpu.strategies.ddp import DDPStrategy
from multigpu.strategies.ddp2 import DDP2Strategy
from multigpu.strategies.dp import DataParallelStrategy
from multigpu.strategies.horovod.strategy import HorovodStrategy
from multigpu.strategies.pipeline import PipelineStrategy
from multigpu.strategies.registry import STRATEGIES, named
from multigpu.strategies.single import SingleDeviceStrategy
from multigpu.strategies.spawn import DDPNotebookStrategy, DDPSpawnStrategy

__all__ = [
    "ALGORITHMS", "STRATEGIES", "BaguaStrategy", "DDP2Strategy", "DDPNotebookStrategy", "DDPSpawnStrategy", "DDPStrategy",
    "DataParallelStrategy", "HorovodStrategy", "PipelineStrategy", "QAdamOptimizer", "SingleDeviceStrategy", "Strategy",
    "named",
]  # fmt: skip
