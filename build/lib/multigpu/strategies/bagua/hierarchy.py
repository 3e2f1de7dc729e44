"""hierarchical=True: the ranks of a node reduce first, then one rank per node communicates.

As in Bagua: (1) the ranks of a node reduce to their first rank, the leader, without
compression, (2) the leaders communicate by the algorithm, (3) each leader broadcasts the
result within its node. So only one rank per node uses the network between the nodes.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.launch.world import find_world


class Hierarchy:
    """The ranks of each node, and their leaders.

    All ranks of `group` must create it. A node is the ranks with the same number of
    rank − local rank, which is the rank of its first process. Raises UserError if the nodes
    have different numbers of ranks, because a mean of the nodes' means would then be wrong.

    nodes      the number of nodes
    leaders    the group of the leaders; None on the other ranks
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        world = find_world(os.environ)
        first = world.rank - world.local_rank
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        nodes: list[int] = [0] * len(members)
        dist.all_gather_object(nodes, first, group)
        ranks_of: dict[int, list[int]] = {}
        for member, node in zip(members, nodes, strict=True):
            ranks_of.setdefault(node, []).append(member)
        sizes = sorted({len(ranks) for ranks in ranks_of.values()})
        if len(sizes) > 1:
            raise UserError(
                f"hierarchical=True needs the same number of ranks on each node, but the "
                f"nodes have {' or '.join(map(str, sizes))} ranks: start as many on each "
                f"node, or leave out hierarchical.",
                already_reported=dist.get_rank() != members[0],
            )
        self.nodes = len(ranks_of)
        self.ranks_per_node = sizes[0]
        self.leader = ranks_of[first][0]
        local = group is not None
        self.own_node = None
        for ranks in ranks_of.values():
            created = dist.new_group(ranks, use_local_synchronization=local)
            if self.leader in ranks:
                self.own_node = created
        first_ranks = [ranks[0] for ranks in ranks_of.values()]
        leaders = dist.new_group(first_ranks, use_local_synchronization=local)
        self.leaders = leaders if dist.get_rank() == self.leader else None

    def reduce(self, vector: torch.Tensor, average: bool = True) -> None:
        """On the leader, replace `vector` by its mean or sum over the node's ranks."""
        dist.reduce(vector, self.leader, group=self.own_node)
        if average and self.leaders is not None:
            vector /= self.ranks_per_node

    def broadcast(self, vector: torch.Tensor) -> None:
        """Overwrite `vector` by the leader's, on all ranks of the node."""
        dist.broadcast(vector, self.leader, self.own_node)

    def run(
        self,
        vector: torch.Tensor,
        between_nodes: Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor],
        average: bool = True,
    ) -> torch.Tensor:
        """All three steps in place. With one node, nothing is left to do between nodes."""
        self.reduce(vector, average)
        if self.leaders is not None and self.nodes > 1:
            vector.copy_(between_nodes(vector, self.leaders))
        self.broadcast(vector)
        return vector
