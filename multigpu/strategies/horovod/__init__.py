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
    allreduce,
    broadcast_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from multigpu.strategies.horovod.compression import Compression
from multigpu.strategies.horovod.optimizer import DistributedOptimizer
from multigpu.strategies.horovod.process import init, local_rank, rank, shutdown, size

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allreduce",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]

NO_OPERATION = "leave op out for a mean; for others use torch.distributed.all_reduce"
# Horovod's other names, and what does the same.
ALTERNATIVES = {
    "Average": NO_OPERATION,
    "Sum": NO_OPERATION,
    "Min": NO_OPERATION,
    "Max": NO_OPERATION,
    "Product": NO_OPERATION,
    "Adasum": "leave op out, and give the learning rate that you would give without Adasum",
    "run": "start the program with `multigpu horovodrun -np N`",
    "is_initialized": "use torch.distributed.is_initialized",
    "local_size": "use multigpu.launch.find_world().local_size",
    "nccl_built": "use torch.distributed.is_nccl_available",
    "barrier": "use torch.distributed.barrier",
    "broadcast": "use broadcast_ on a clone of the tensor",
    "allgather": "use torch.distributed.all_gather",
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
