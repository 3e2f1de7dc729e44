"""This process's rank and the number of ranks, from `init` to `shutdown`."""

import atexit

import torch.distributed as dist

from multigpu import devices
from multigpu.errors import UserError
from multigpu.launch import rendezvous
from multigpu.launch.world import World, find_world
from multigpu.strategies.ranks import num_ranks

# Horovod's interface is functions without an object, so this module keeps their state.
_world: World | None = None
_started_group = False


def init() -> None:
    """Find this process's rank and device, and connect to the other ranks.

    If torch.distributed runs already, it is used. Otherwise the device is cuda:local_rank,
    which becomes the current device, or the CPU.
    """
    global _world, _started_group
    _world = find_world()
    if not dist.is_initialized():
        device = devices.pick(_world)
        store = rendezvous.open_store(_world, device)
        dist.init_process_group(
            devices.backend(device), store=store, rank=_world.rank, world_size=_world.size
        )
        _started_group = True
        atexit.register(shutdown)


def shutdown() -> None:
    """Destroy the process group if `init` started it: others use one that ran before."""
    global _world, _started_group
    if _started_group and dist.is_initialized():
        dist.destroy_process_group()
    _world = None
    _started_group = False


def size() -> int:
    """The number of ranks. Raises UserError before `init`."""
    _place()
    return num_ranks()


def rank() -> int:
    """This process's rank, from 0 on. Raises UserError before `init`."""
    _place()
    return dist.get_rank()


def local_rank() -> int:
    """The rank within this node, which is also the index of the GPU."""
    return _place().local_rank


def _place() -> World:
    if _world is None:
        raise UserError("Horovod has not been started: call init() first.")
    return _world
