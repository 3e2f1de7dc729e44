"""A process group for one rank of a large world: one process is rank R of N.

    control.start(1, gpu="H100-80GB", link="NVLink4", gpus_per_node=8, between_nodes="NDR400",
               compute=False)
    dist.init_process_group("vgpu_world", rank=0, world_size=1024, store=dist.HashStore())

The other ranks do not exist. They are taken to do the same as this rank at the same simulated
time, with the same numbers: a collective starts when this rank arrives, and takes the time of
its ranks' nodes (sim/network.py). Slow ranks (stragglers) cost nothing here.

A message between two ranks needs the time of the other rank, so both must run: each in a
process of its own, joined by a Messenger. Otherwise send and recv raise UserError.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.virtual.patches import process_group
from multigpu.virtual.patches.collectives import Gloo
from multigpu.virtual.patches.process_group import VirtualGroup
from multigpu.virtual.patches.same_ranks import SameRanks
from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.sim.network import Group, Network

NAME = "vgpu_world"


class Messenger:
    """Sends tensors between those ranks of a world that run, through gloo.

    `ranks` are the ranks that run, `rank` is this process's, and `store` joins the processes.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int):
        self.ranks = tuple(ranks)
        self.gloo = Gloo(store, self.ranks.index(rank), len(self.ranks))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Send to rank `rank` of the world."""
        return self.gloo.send(tensors, self.ranks.index(rank), tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        """Receive from rank `rank` of the world."""
        return self.gloo.recv(tensors, self.ranks.index(rank), tag)


# This process's Messenger; None if it is the only rank that runs.
_messenger: Messenger | None = None


def set_messenger(messenger: Messenger | None) -> None:
    """Set the Messenger for all groups of this process."""
    global _messenger
    _messenger = messenger


class WorldGroup(VirtualGroup):
    """The ranks `global_ranks` of the world; `rank` is this rank's number among them.

    An empty list stands for all ranks. torch fills `options.global_ranks_in_group`, for some
    backends after the group was made.
    """

    def __init__(self, rank: int, size: int, global_ranks: Sequence[int] = ()):
        super().__init__(_Ranks(self, rank, size), rank, size)
        self.options = SimpleNamespace(global_ranks_in_group=list(global_ranks))

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that are in this group."""
        return tuple(self.options.global_ranks_in_group) or tuple(range(self.size()))

    def getBackendName(self) -> str:
        return NAME

    def global_rank(self, rank: int) -> int:
        return self.global_ranks[rank]

    def _group(self, network: Network, nodes: list[float]) -> Group:
        return _group_of(network, self.global_ranks)

    def _count(self, meter: Meter, rank: int, nbytes: float, node: float) -> None:
        # All rows of the exchange are this rank's.
        node = meter.machine.network.node(self.global_ranks[rank])
        super()._count(meter, rank, nbytes, node)

    def _node(self, meter: Meter) -> int:
        return meter.machine.network.node(self.global_ranks[self.rank()])

    def _message(self, name: str, tensors: list, rank: int, *more: Any) -> dist.Work:
        peer = self.global_ranks[rank]
        if _messenger is None or peer not in _messenger.ranks:
            own = self.global_ranks[self.rank()]
            raise UserError(
                f"rank {own} calls {name} with rank {peer}, which does not run, and a message "
                f"needs the time of both: run both ranks (multigpu virtual --as-rank "
                f"{own},{peer}), and of a pipeline one rank for each stage."
            )
        return super()._message(name, tensors, rank, *more)


class _Ranks(SameRanks):
    """The ranks of a WorldGroup: all have this rank's numbers, and some can get messages."""

    def __init__(self, group: WorldGroup, rank: int, size: int):
        super().__init__(rank, size)
        self._group = group

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return _messenger.send(tensors, self._group.global_ranks[rank], tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return _messenger.recv(tensors, self._group.global_ranks[rank], tag)


@lru_cache(maxsize=1024)
def _group_of(network: Network, global_ranks: tuple[int, ...]) -> Group:
    return network.group(global_ranks)


def _create(options: Any, backend_options: Any) -> WorldGroup:
    return WorldGroup(options.group_rank, options.group_size, options.global_ranks_in_group)


def register() -> Callable[[], None]:
    """Make "vgpu_world" a name for dist.init_process_group."""
    # Only with its extended API does torch say which global ranks a group has.
    return process_group.register(NAME, _create, extended_api=True)
