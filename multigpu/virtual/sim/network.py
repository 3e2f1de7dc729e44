"""Times of transfers and collectives between GPUs, in one node and across nodes.

    network = Network(LINKS["NVLink4"], LINKS["NDR400"], gpus_per_node=8)
    everyone = network.group(1024)                  # GPUs 0 … 1023, on 128 nodes
    firsts = network.group(range(0, 1024, 8))       # the first GPU of each node
    collective_seconds("allreduce", 2**30, everyone)

No virtual GPUs have to run. GPUs are numbered node by node: GPU i is on node
i // gpus_per_node.

Transfers follow the alpha-beta model: latency + bytes / bandwidth. Collectives follow the
tuning model with which NCCL itself chooses: for each algorithm (ring, tree) and each protocol
(LL, LL128, Simple)

    seconds = latency of all steps + bytes moved / bandwidth,

and the smallest is taken. Source: NCCL 2.30.7, https://github.com/NVIDIA/nccl,
src/graph/tuning.cc, functions ncclTopoTuneModel and ncclTopoGetAlgoTime. Over links without
NCCL's figures (a Link of your own) there is one protocol, without a base latency, and each
step takes the link's latency: Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", International Journal of High Performance Computing
Applications 19(1), 2005.

What differs from NCCL:
- There is no search for channels: a ring's bandwidth is the link's, and across nodes the
  smaller of the link's and of the adapters' of all its GPUs on one node. NCCL's limits per
  channel are left out.
- The algorithms NVLS, CollNet (in switches) and PAT (one GPU per node) are left out.
- NCCL's correction of trees jumps at powers of two; here it is interpolated, because a larger
  message must not be faster.
- Broadcast and reduce pass n - 1 links, each with its own latency; NCCL takes one latency for
  all steps.
Two groups that use a link inside a node at the same time do not slow each other down. Between
nodes, GPUs that share an adapter have equal parts of it at all times.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log2
from typing import Literal

from multigpu.errors import UserError
from multigpu.virtual.sim.presets import NETWORKS, Link

Algorithm = Literal["ring", "tree"]

LL, LL128, SIMPLE = range(3)
# A copy between a GPU and the host's pinned memory reaches this part of the link; one with
# pageable memory goes by way of a pinned buffer, which a core of the host fills, in bytes/s.
# Measured on one H100 with PCIe 5 (benchmarks/gpu, 256 MiB: 54.4 of 63 GB/s, 8.2 to 13.6).
PINNED_SHARE = 0.86
PAGEABLE = 10e9
# A protocol for links without NCCL's figures.
PLAIN = None
# Seconds before the first step: LL, LL128, Simple (baseLatencies).
RING_BASE = (6.6e-6, 14e-6, 8.4e-6)
TREE_BASE = (6.8e-6, 14e-6, 8.4e-6)
# LL's limit in bytes/s across two nodes and across more (llMaxBws, with Intel's processors).
LL_TWO_NODES = 39e9
LL_MORE_NODES = 20.4e9
# Seconds that the host needs to post a message of a ring across nodes (getNetOverhead); three
# times that with Simple.
NET_OVERHEAD = 1e-6
# The bytes per rank from which NCCL counts a ring's plateau.
PLATEAU_BYTES = 64
# Sends that NCCL starts together (src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH).
MESSAGES_AT_ONCE = 8
# The part of a tree's bandwidth that messages reach, at 64 B, 128 B, … with LL, LL128 and
# Simple (treeCorrectionFactor, in tenths). From the last size on it is the whole bandwidth.
TREE_TENTHS = (
    "10 10 10 10 9 8 7 7 7 7 6 5 4 4 5 6 7 8 9 10",
    "10 10 10 10 10 9 8 8 8 7 6 6 6 6 6 6 8 9 9 9 9 10",
    "9 9 9 9 9 9 9 8 7 6 6 5 5 5 5 6 7 8 7 7 8 9 9 10",
)
TREE_CORRECTION = [[int(tenth) / 10 for tenth in row.split()] for row in TREE_TENTHS]


@dataclass(frozen=True)
class Network:
    """How GPUs are joined: by `link` inside a node, and by `between` between nodes.

    Without `between` and `gpus_per_node` all GPUs are on one node. If `link` is a network,
    each GPU is then a node of its own.

    Raises UserError for a gpus_per_node that is no positive whole number, and if `between` is
    given without gpus_per_node, or gpus_per_node without `between`.
    """

    link: Link
    between: Link | None = None
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        per_node = self.gpus_per_node
        if per_node is None:
            if self.between is not None:
                raise UserError(
                    "the link between nodes needs gpus_per_node: give the number of GPUs of a "
                    "node too."
                )
            return
        if not isinstance(per_node, int) or isinstance(per_node, bool) or per_node < 1:
            raise UserError(
                f"gpus_per_node is {per_node!r}: the number of GPUs of a node is a whole "
                f"number from 1 up."
            )
        if self.between is None:
            raise UserError(
                f"gpus_per_node needs a link between the nodes: set between_nodes to "
                f"{', '.join(NETWORKS)} or your own Link(…)."
            )

    @cached_property
    def adapter(self) -> Link:
        """One GPU's way to other nodes: its own adapter, or its part of the node's."""
        if self.between is None:
            return self.link
        if self.between.adapter == "gpu":
            return self.between
        return self.between.divided(self.gpus_per_node)

    def node(self, gpu: int) -> int:
        """The node of a GPU."""
        return 0 if self.gpus_per_node is None else gpu // self.gpus_per_node

    def path(self, node: int, other: int) -> Link:
        """The link between a GPU of one node and a GPU of another node, or of the same."""
        return self.link if node == other else self.adapter

    def group(self, gpus: int | Iterable[int]) -> "Group":
        """The group of these GPUs; a number n stands for GPUs 0 … n - 1."""
        numbers = range(gpus) if isinstance(gpus, int) else gpus
        return self.group_on([self.node(gpu) for gpu in numbers])

    def group_on(self, nodes: Sequence[int]) -> "Group":
        """The group of ranks that are on these nodes, one number for each rank."""
        if self.between is None and self.link.adapter is not None:
            nodes = range(len(nodes))
        per_node = Counter(nodes)
        return Group(self, len(nodes), len(per_node), min(per_node.values(), default=0))

    def label(self) -> str:
        """The links as text: "NVLink2", or "2 per node: NVLink2 inside, HDR200 between"."""
        if self.between is None:
            return self.link.name
        names = f"{self.link.name} inside, {self.between.name} between"
        return f"{self.gpus_per_node} per node: {names}"


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: `ranks` on `nodes` nodes, at least `per_node` on each."""

    network: Network
    ranks: int
    nodes: int
    per_node: int

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The links that a ring of all ranks passes."""
        inside = (self.network.link,) if self.ranks > self.nodes else ()
        across = (self.network.adapter,) if self.nodes > 1 else ()
        return inside + across

    @cached_property
    def bandwidths(self) -> tuple[float, float]:
        """Bytes/s of a ring inside the nodes, and between them; infinite without such a link.

        Across nodes a ring uses the adapters of all its GPUs on a node.
        """
        inside = across = float("inf")
        if self.ranks > self.nodes:
            inside = _bandwidth(self.network.link)
        if self.nodes > 1:
            across = self.per_node * _bandwidth(self.network.adapter)
        return inside, across

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s of a ring, in each direction: min(link, per_node · adapter)."""
        return min(self.bandwidths)

    @cached_property
    def protocols(self) -> tuple[int | None, ...]:
        """NCCL's protocols for these links, or PLAIN if no link has NCCL's figures."""
        figures = [link.nccl for link in self.links if link.nccl]
        if not figures:
            return (PLAIN,)
        if all(nccl.ll128 for nccl in figures):
            return (LL, LL128, SIMPLE)
        return (LL, SIMPLE)


def transfer_seconds(nbytes: float, link: Link) -> float:
    """Seconds of one copy, or of one send with its receive: latency + bytes / bandwidth.

    NCCL's tuning model has no send and receive.
    """
    return link.latency + nbytes / link.bandwidth


def host_copy_seconds(nbytes: float, link: Link, pinned: bool) -> float:
    """Seconds of a copy between a GPU and pinned or pageable memory of the host."""
    bandwidth = PINNED_SHARE * link.bandwidth
    if not pinned:
        bandwidth = min(bandwidth, PAGEABLE)
    return link.latency + nbytes / bandwidth


def collective_seconds(
    name: str, nbytes: float, group: Group, algorithm: Algorithm | None = None
) -> float:
    """Seconds of one collective.

    `name` is "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "gather",
    "scatter" or "alltoall". For allreduce, broadcast, reduce and alltoall, `nbytes` is the
    size of one rank's tensor; for the others it is the size of all ranks' chunks together.

    `algorithm` is for allreduce: "ring" or "tree"; by default the faster one, as in NCCL.

    Raises UserError for another name, and for an algorithm that the collective does not have.
    """
    if name not in TRAFFIC:
        raise UserError(f"there is no collective {name!r}: use one of {', '.join(TRAFFIC)}.")
    algorithms = ("ring", "tree") if name == "allreduce" else ("ring",)
    if algorithm is not None and algorithm not in algorithms:
        raise UserError(
            f"{name} has no algorithm {algorithm!r}: use {' or '.join(algorithms)}."
        )
    if group.ranks <= 1:
        return 0.0
    if name in ("gather", "scatter", "alltoall"):
        return _messages_seconds(name, nbytes, group)
    times = []
    for protocol in group.protocols:
        if algorithm != "tree":
            times.append(_ring_seconds(name, nbytes, group, protocol))
        if name == "allreduce" and algorithm != "ring":
            times.append(_tree_seconds(nbytes, group, protocol))
    return min(times)


# The bytes that pass each link of a ring of n ranks, as a part of `nbytes`.
TRAFFIC = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
}


def sent_bytes(
    name: str, nbytes: float, rank: int, ranks: int, root: int = 0
) -> dict[int, float]:
    """The bytes that a rank sends in a collective, by the number of the other rank.

    `nbytes` is as for collective_seconds. The ring has the ranks in their order. NCCL finds an
    order of its own, and its trees take other pairs.
    """
    if ranks <= 1:
        return {}
    if name == "gather":
        return {} if rank == root else {root: nbytes / ranks}
    if name == "alltoall" or (name == "scatter" and rank == root):
        return {other: nbytes / ranks for other in range(ranks) if other != rank}
    if name == "scatter":
        return {}
    following = (rank + 1) % ranks
    # A broadcast ends, and a reduction begins, at the root's neighbour.
    if (name == "broadcast" and following == root) or (name == "reduce" and rank == root):
        return {}
    return {following: nbytes * TRAFFIC[name](ranks)}


def _ring_seconds(name: str, nbytes: float, group: Group, protocol: int | None) -> float:
    """n - 1 steps, or 2 (n - 1) for allreduce; one step for each node crosses to the next.

    seconds = base + steps inside · latency + steps across · latency + traffic / bandwidth

    With one rank per node NCCL takes the tree's latency for the steps across nodes.
    """
    rounds = 2 if name == "allreduce" else 1
    across = rounds * (group.nodes - 1)
    inside = rounds * (group.ranks - 1) - across
    inside_seconds = _step("ring", group.network.link, protocol)
    across_seconds = _step(
        "tree" if group.ranks == group.nodes else "ring", group.network.adapter, protocol
    )
    bandwidth = group.bandwidth
    seconds = 0.0
    plateau = 1.0
    if protocol is not PLAIN:
        seconds = RING_BASE[protocol]
        if group.nodes > 1:
            overhead = 3 * NET_OVERHEAD if protocol == SIMPLE else NET_OVERHEAD
            inside_seconds = max(inside_seconds, overhead)
        if protocol == LL:
            bandwidth = min(_ll_limit(group), bandwidth / 2)
        elif protocol == LL128:
            bandwidth *= 0.92
        elif group.nodes > 1 and rounds == 2 and nbytes / group.ranks >= PLATEAU_BYTES:
            plateau = (group.network.link.nccl or group.network.adapter.nccl).plateau
    seconds += inside * inside_seconds + across * across_seconds
    return plateau * seconds + nbytes * TRAFFIC[name](group.ranks) / bandwidth


def _tree_seconds(nbytes: float, group: Group, protocol: int | None) -> float:
    """All-reduce up and down a tree: a chain inside each node, a binary tree of the nodes.

    seconds = base + 2 (steps inside · latency + log2(nodes) · latency) + 2 bytes / bandwidth
    """
    inside = ceil(group.ranks / group.nodes) - 1
    across = floor(log2(group.nodes))
    seconds = 2 * (
        inside * _step("tree", group.network.link, protocol)
        + across * _step("tree", group.network.adapter, protocol)
    )
    bandwidth = group.bandwidth
    if protocol is not PLAIN:
        seconds += TREE_BASE[protocol]
        bandwidth *= 0.92
        if protocol == LL:
            bandwidth = min(_ll_limit(group), bandwidth / 3.8)
        elif protocol == LL128:
            bandwidth *= 7 / 9 if group.nodes == 1 else 120 / 128
        bandwidth *= _tree_correction(nbytes, protocol)
    return seconds + 2 * nbytes / bandwidth


def _messages_seconds(name: str, nbytes: float, group: Group) -> float:
    """gather, scatter and alltoall: each rank sends a chunk to the root, or to every rank.

    NCCL has sends and receives for these, eight at once. Chunks of the same node pass the
    link, the others pass the adapter, both at the same time:

    seconds = ⌈(n - 1) / 8⌉ · latency + max(chunks inside / link, chunks across / adapter)
    """
    chunk = nbytes / group.ranks
    inside = (ceil(group.ranks / group.nodes) - 1) * chunk / group.network.link.bandwidth
    across = (group.ranks - group.per_node) * chunk / group.network.adapter.bandwidth
    latency = max(link.latency for link in group.links)
    starts = ceil((group.ranks - 1) / MESSAGES_AT_ONCE)
    return starts * latency + max(inside, across)


def _bandwidth(link: Link) -> float:
    """The bandwidth for collectives."""
    return link.nccl.bandwidth if link.nccl else link.bandwidth


def _step(algorithm: Algorithm, link: Link, protocol: int | None) -> float:
    """Seconds of one step over the link."""
    if link.nccl is None or protocol is PLAIN:
        return link.latency
    return getattr(link.nccl, algorithm)[protocol]


def _ll_limit(group: Group) -> float:
    """The most bytes/s that the protocol LL reaches."""
    if group.nodes > 1:
        return LL_TWO_NODES if group.nodes == 2 else LL_MORE_NODES
    (link,) = group.links
    return link.nccl.ll_bandwidth


def _tree_correction(nbytes: float, protocol: int) -> float:
    """The part of the bandwidth that a tree reaches with messages of `nbytes` bytes."""
    factors = TREE_CORRECTION[protocol]
    place = min(max(log2(max(nbytes, 1) / 64), 0), len(factors) - 1)
    before = floor(place)
    after = min(before + 1, len(factors) - 1)
    return factors[before] + (place - before) * (factors[after] - factors[before])
