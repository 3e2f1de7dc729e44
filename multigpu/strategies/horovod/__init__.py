"""The course's own Horovod: the functions of horovod.torch, built on torch.distributed.

Each gradient is averaged over the ranks as soon as it is ready. `step()` waits for all
averages:

    from multigpu.strategies import horovod as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from multigpu.strategies.horovod.collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from multigpu.strategies.horovod.compression import Compression
from multigpu.strategies.horovod.optimizer import DistributedOptimizer
from multigpu.strategies.horovod.process import (
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
