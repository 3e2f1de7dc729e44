"""The strategies: how one or several devices train a model, with or without the Trainer.

They differ in what the ranks send to each other, and when.
"""

from multigpu.errors import unsupported_names
from multigpu.strategies.bagua import ALGORITHMS, BaguaStrategy, QAdamOptimizer
from multigpu.strategies.base import Strategy
from multigpu.strategies.ddp import DDPStrategy
from multigpu.strategies.ddp2 import DDP2Strategy
from multigpu.strategies.dp import DataParallelStrategy
from multigpu.strategies.horovod.strategy import HorovodStrategy
from multigpu.strategies.pipeline import PipelineStrategy
from multigpu.strategies.registry import ALTERNATIVES, STRATEGIES, strategy_by_name
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

# Lightning's classes that are not here → their names in registry.ALTERNATIVES.
UNSUPPORTED = {
    "DDPShardedStrategy": "ddp_sharded",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "model_parallel",
    "XLAStrategy": "xla",
}


__getattr__ = unsupported_names(
    __name__, {name: ALTERNATIVES[alternative] for name, alternative in UNSUPPORTED.items()}
)
