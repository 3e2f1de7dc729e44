"""A process group for one rank of a large world: one process is rank R of N.

    vgpu.start(1, gpu="H100-80GB", link="NVLink4", gpus_per_node=8, between_nodes="NDR400",
               compute=False)
    dist.init_process_group("vgpu_world", rank=0, world_size=1024, store=dist.HashStore())

The other ranks do not exist. They are taken to do the same as this rank at the same simulated
time, with the same numbers: a collective starts when this rank arrives, and takes the time of
its ranks' nodes (sim/network.py). Slow ranks (stragglers) cost nothing here. Messages between
ranks need the time of the other rank, so send and recv raise UserError.
"""

from functools import lru_cache
from typing import Any

import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.vgpu.patches.process_group import DEVICES, VirtualGroup
from multigpu.vgpu.patches.same_ranks import SameRanks
from multigpu.vgpu.sim.network import Group, Network

NAME = "vgpu_world"


class WorldGroup(VirtualGroup):
    """The ranks `global_ranks` of the world; `rank` is this rank's number among them."""

    def __init__(self, rank: int, size: int, global_ranks: list[int]):
        super().__init__(SameRanks(rank, size), rank, size)
        self.global_ranks = tuple(global_ranks) or tuple(range(size))

    def getBackendName(self) -> str:
        return NAME

    def _group(self, network: Network, nodes: list[float]) -> Group:
        return _group_of(network, self.global_ranks)

    def _message(self, name: str, *args: Any) -> dist.Work:
        raise UserError(
            f"{name} needs the time of the other rank, but a world in one process has only "
            f"the time of its own rank: use collectives, or start a process for each rank, "
            f'with the backend "vgpu".'
        )


@lru_cache(maxsize=1024)
def _group_of(network: Network, global_ranks: tuple[int, ...]) -> Group:
    return network.group(global_ranks)


def _create(options: Any, backend_options: Any) -> WorldGroup:
    return WorldGroup(options.group_rank, options.group_size, options.global_ranks_in_group)


def register() -> None:
    """Make "vgpu_world" a name for dist.init_process_group."""
    # Only with its extended API does torch say which global ranks a group has.
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
