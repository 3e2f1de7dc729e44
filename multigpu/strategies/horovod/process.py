"""This process's rank and the number of ranks, from `init` to `shutdown`."""

import atexit

import torch.distributed as dist

from multigpu import devices
from multigpu.errors import UserError
from multigpu.launch import rendezvous
from multigpu.launch.world import World, find_world
from multigpu.strategies.ranks import num_ranks


class Process:
    """What `init` has found: this process's rank and the number of ranks."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._started_group = False

    @property
    def world(self) -> World:
        """The rank and the number of ranks. Raises UserError before `init`."""
        if self._world is None:
            raise UserError("Horovod has not been started: call init() first.")
        return self._world

    def start(self) -> None:
        """Start torch.distributed, unless it runs already."""
        world = find_world()
        if not dist.is_initialized():
            device = devices.pick(world)
            store = rendezvous.open_store(world, device)
            dist.init_process_group(
                devices.backend(device), store=store, rank=world.rank, world_size=world.size
            )
            self._started_group = True
            atexit.register(self.end)
        self._world = world

    def end(self) -> None:
        """Destroy the process group if `start` started it: others use one that ran before."""
        if self._started_group and dist.is_initialized():
            dist.destroy_process_group()
        self._started_group = False
        self._world = None


# Horovod's interface is functions without an object, so this module keeps their state.
PROCESS = Process()


def init() -> None:
    """Find this process's rank and device, and connect to the other ranks.

    If torch.distributed runs already, it is used. Otherwise the device is cuda:local_rank,
    which becomes the current device, or the CPU.
    """
    PROCESS.start()


def shutdown() -> None:
    """End what `init` has started."""
    PROCESS.end()


def size() -> int:
    """The number of ranks. Raises UserError before `init`."""
    _ = PROCESS.world
    return num_ranks()


def rank() -> int:
    """This process's rank, from 0 on. Raises UserError before `init`."""
    _ = PROCESS.world
    return dist.get_rank()


def local_rank() -> int:
    """The rank within this node, which is also the index of the GPU."""
    return PROCESS.world.local_rank
