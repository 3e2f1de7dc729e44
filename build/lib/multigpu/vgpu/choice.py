"""The devices of a lesson: the machine's GPUs if it has enough, otherwise virtual GPUs."""

import os

import torch

from multigpu import devices, vgpu
from multigpu.errors import UserError, pluralize
from multigpu.launch.world import World
from multigpu.vgpu.sim import machine


def gpus(count: int = 2, world: World | None = None) -> list[torch.device]:
    """`count` devices for this process: cuda:0, … if there are enough, otherwise vgpu:0, …

    If virtual GPUs are needed but none are running, they are started. If virtual GPUs are
    returned, rank 0 prints a sentence that announces them. With `world`, each rank of a node
    gets `count` GPUs that no other rank uses: with count=2, local rank 1 gets cuda:2 and
    cuda:3.

    Raises UserError if virtual GPUs are running, but fewer than `count`, or if torch does not
    see the GPUs of a Slurm job.
    """
    if world is None:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        world = World(rank=int(rank))
    real = devices.gpus_of_rank(count, world)
    if real:
        return real
    virtual = vgpu.devices()
    if virtual and machine.index_named(count - 1) == 0:
        # cuda:1 is another name of cuda:0.
        return [virtual[0]] * count
    if virtual and len(virtual) < count:
        are = "is" if len(virtual) == 1 else "are"
        raise UserError(
            f"{count} GPUs were requested, but only {pluralize(len(virtual), 'virtual GPU')} "
            f"{are} running: call vgpu.stop() first."
        )
    virtual = virtual or vgpu.start(count)
    if world.local_size > 1:
        devices.share_cores(world)
    if world.rank == 0:
        print(_announcement(count, world))
    return virtual[:count]


def _announcement(count: int, world: World) -> str:
    real = devices.visible_gpus(world)
    has = pluralize(real, "GPU") if real else "no GPU"
    compute = f"{count} virtual GPUs compute" if count > 1 else "a virtual GPU computes"
    if world.size > 1:
        compute = f"in each of {world.size} processes {compute}"
    # Two lines, because a notebook has room for 95 columns.
    text = f"This machine has {has}: {compute} on the CPU instead\n({vgpu.label()})."
    if torch.cuda.is_available():
        text += (
            "\nIn this process PyTorch now trains on virtual GPUs alone: to train on the real "
            "GPU,\nstart another one (restart the kernel)."
        )
    return text
