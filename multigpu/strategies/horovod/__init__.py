"""The course's own Horovod: the functions of horovod.torch, built on torch.distributed.

Each gradient is averaged over the ranks as soon as it is ready. `step()` waits for all
averages:

    from multigpu.strategies import horovod as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from typing import NoReturn

from multigpu.strategies.horovod.collectives import (
    allgather,
    allreduce,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from multigpu.strategies.horovod.compression import Compression
from multigpu.strategies.horovod.operations import Adasum, Average, Max, Min, Product, Sum
from multigpu.strategies.horovod.optimizer import DistributedOptimizer
from multigpu.strategies.horovod.process import (
    init,
    is_initialized,
    local_rank,
    local_size,
    nccl_built,
    rank,
    shutdown,
    size,
)
from multigpu.strategies.horovod.run import run

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "nccl_built",
    "rank",
    "run",
    "shutdown",
    "size",
]

# Horovod's other names, and what does the same.
ALTERNATIVES = {
    "elastic": "start with `torchrun --max-restarts`",
    "join": "give all ranks the same number of batches, as DistributedSampler does",
    "alltoall": "use torch.distributed.all_to_all_single",
    "allgather_object": "use torch.distributed.all_gather_object",
    "allreduce_async": "use torch.distributed.all_reduce(async_op=True)",
    "broadcast_async": "use torch.distributed.broadcast(async_op=True)",
    "reducescatter": "use torch.distributed.reduce_scatter_tensor",
    "grouped_allreduce": "call allreduce for each tensor",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm",
    "ProcessSet": "use torch.distributed.new_group",
    "add_process_set": "use torch.distributed.new_group",
    "start_timeline": "use torch.profiler",
}


def __getattr__(name: str) -> NoReturn:
    if name in ALTERNATIVES:
        raise AttributeError(
            f"the course's Horovod has no {name!r}: {ALTERNATIVES[name]}, or install Horovod."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
