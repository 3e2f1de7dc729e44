"""The bytes that ranks and GPUs send to each other in a run, as a table.

Copies are counted as they are made. A collective goes round a ring, as in
network.sent_bytes: NCCL finds an order of its own, and its trees take other pairs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from multigpu.virtual.sim.presets import format_bytes
from multigpu.virtual.table import table

# The pairs that the text names: those with the most bytes.
MOST = 16


class Flow(NamedTuple):
    """The bytes from one rank, GPU or host to another, and the nodes of both."""

    source: str
    destination: str
    source_node: int
    destination_node: int
    bytes: int


def text(flows: Sequence[Flow]) -> Iterator[str]:
    """Lines for the report: the pairs, and with several nodes the pairs of nodes."""
    if not flows:
        yield "traffic: none"
        return
    rows = [
        (f"{flow.source} → {flow.destination}", format_bytes(flow.bytes), _way(flow))
        for flow in sorted(flows, key=lambda flow: -flow.bytes)
    ]
    between: Counter[str] = Counter()
    for flow in flows:
        if flow.source_node != flow.destination_node:
            between[_way(flow)] += flow.bytes
    sums = [(f"all of {way}", format_bytes(nbytes), "") for way, nbytes in between.items()]
    yield from table(
        [("traffic (collectives as rings)", "bytes", "nodes"), *rows[:MOST], *sums]
    )
    if len(rows) > MOST:
        yield f"… and {len(rows) - MOST} pairs with fewer bytes (--json has all)"


def _way(flow: Flow) -> str:
    if flow.source_node == flow.destination_node:
        return f"node {flow.source_node}"
    return f"node {flow.source_node} → node {flow.destination_node}"
