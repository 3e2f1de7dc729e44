"""Which devices does a lesson use? The machine's GPUs if it has enough, else virtual ones, and one line that says so."""

import os

import torch

from multigpu import vgpu
from multigpu.devices import CLASSROOM, share_cores
from multigpu.errors import UserError, counted
from multigpu.world import World


def gpus(count: int = 2, world: World | None = None) -> list[torch.device]:
    """`count` devices for this process: cuda:0 … where the machine has as many, else vgpu:0 …, started if none are running.

    With `world` each rank of the node gets `count` GPUs of its own: local rank 1 gets cuda:2 and cuda:3 if count is 2.
    Raises UserError if fewer virtual GPUs are running than were asked for.
    """
    world = world or World(rank=int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))))
    there = 0 if os.environ.get("SLURM_CLUSTER_NAME") == CLASSROOM else torch.cuda.device_count()
    # With srun --gpus-per-task each rank sees its own GPUs only, numbered from 0.
    bound = world.launcher == "srun" and int(os.environ.get("SLURM_GPUS_ON_NODE") or 0) >= count * world.local_size
    if there >= count * world.local_size or (bound and there == count):
        first = 0 if there == count else count * world.local_rank
        if first:
            torch.cuda.set_device(first)
        return [torch.device("cuda", first + index) for index in range(count)]
    if (already := vgpu.devices()) and len(already) < count:
        raise UserError(
            f"{count} GPUs were asked for, and only {counted(len(already), 'virtual one')} {'is' if len(already) == 1 else 'are'} running: "
            f"call vgpu.stop() first."
        )
    devices = already or vgpu.start(count)
    if world.local_size > 1:
        share_cores(world)
    if world.rank == 0:  # one rank speaks for all
        has = counted(there, "GPU") if there else "no GPU"
        ones = f"{count} virtual GPUs compute" if count > 1 else "a virtual GPU computes"
        ones = f"in each of {world.size} processes {ones}" if world.size > 1 else ones
        print(f"This machine has {has}: {ones} on the CPU instead ({vgpu.label()}).")
    return devices[:count]
