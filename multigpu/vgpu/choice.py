"""Which devices does a lesson use? The machine's GPUs if it has enough, else virtual ones, and one line that says so."""

import os

import torch

from multigpu import devices, vgpu
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import World


def gpus(count: int = 2, world: World | None = None) -> list[torch.device]:
    """`count` devices for this process: cuda:0 … where the machine has as many, else vgpu:0 …, started if none are running.

    With `world` each rank of the node gets `count` GPUs of its own: local rank 1 gets cuda:2 and cuda:3 if count is 2.
    Raises UserError if fewer virtual GPUs are running than were asked for, or if torch does not see the GPUs of a Slurm job.
    """
    world = world or World(
        rank=int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    )
    if real := devices.own(count, world):
        return real
    if (already := vgpu.devices()) and len(already) < count:
        raise UserError(
            f"{count} GPUs were asked for, and only {pluralize(len(already), 'virtual one')} {'is' if len(already) == 1 else 'are'} running: "
            f"call vgpu.stop() first."
        )
    places = already or vgpu.start(count)
    if world.local_size > 1:
        devices.share_cores(world)
    if world.rank == 0:  # one rank speaks for all
        there = devices.seen(world)
        has = pluralize(there, "GPU") if there else "no GPU"
        ones = f"{count} virtual GPUs compute" if count > 1 else "a virtual GPU computes"
        ones = f"in each of {world.size} processes {ones}" if world.size > 1 else ones
        print(f"This machine has {has}: {ones} on the CPU instead ({vgpu.label()}).")
    return places[:count]
