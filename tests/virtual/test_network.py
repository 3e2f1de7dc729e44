"""Times of transfers and collectives, in one node and across nodes, without virtual GPUs."""

from dataclasses import replace

import pytest

from multigpu import LINKS, Link
from multigpu.errors import UserError
from multigpu.virtual.sim.network import (
    TRAFFIC,
    Network,
    collective_seconds,
    transfer_seconds,
)

MB = 10**6
# Links without NCCL's figures: every step takes the latency, so times can be computed by hand.
FAST = Link("fast", bandwidth=1e9, latency=1e-5)
SLOW = Link("slow", bandwidth=1e8, latency=1e-3, adapter="gpu")
DGX = Network(LINKS["NVLink4"], LINKS["NDR400"], 8)
V100 = Network(LINKS["NVLink2"], LINKS["HDR200"], 8)
US = 1e-6


def test_a_transfer():
    assert transfer_seconds(MB, FAST) == pytest.approx(1e-5 + 1e-3)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("allreduce", 6 * (1e-5 + 0.25e-3)),
        ("allgather", 3 * (1e-5 + 0.25e-3)),
        ("reduce_scatter", 3 * (1e-5 + 0.25e-3)),
        ("broadcast", 3e-5 + 1e-3),
        ("reduce", 3e-5 + 1e-3),
        # three messages of a quarter each, all started at once
        ("gather", 1e-5 + 0.75e-3),
        ("scatter", 1e-5 + 0.75e-3),
        ("alltoall", 1e-5 + 0.75e-3),
    ],
)
def test_four_ranks_in_a_node(name, seconds):
    assert collective_seconds(name, MB, Network(FAST).group(4)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "algorithm", "seconds"),
    [
        # Two nodes of two: of 6 steps 2 go across, and the two adapters carry 2e8 bytes/s.
        ("allreduce", "ring", 4e-5 + 2e-3 + 1.5 * MB / 2e8),
        # One step inside a node and one across, up and down; 2 · bytes.
        ("allreduce", "tree", 2 * (1e-5 + 1e-3) + 2 * MB / 2e8),
        ("allgather", None, 2e-5 + 1e-3 + 0.75 * MB / 2e8),
        ("reduce_scatter", None, 2e-5 + 1e-3 + 0.75 * MB / 2e8),
        ("broadcast", None, 2e-5 + 1e-3 + MB / 2e8),
        ("reduce", None, 2e-5 + 1e-3 + MB / 2e8),
        # Two of three chunks go across, over the root's adapter.
        ("gather", None, 1e-3 + 0.5 * MB / 1e8),
        ("scatter", None, 1e-3 + 0.5 * MB / 1e8),
        ("alltoall", None, 1e-3 + 0.5 * MB / 1e8),
    ],
)
def test_four_ranks_on_two_nodes(name, algorithm, seconds):
    group = Network(FAST, SLOW, 2).group(4)
    assert collective_seconds(name, MB, group, algorithm) == pytest.approx(seconds)


def test_nccls_figures_inside_a_node():
    """All-reduce of 8 V100 over NVLink2: base + 14 steps, and 14/8 of the bytes."""
    group = V100.group(8)
    # 100 MB, Simple, at 120 GB/s
    simple = 8.4 * US + 14 * 3.4 * US + 1.75e8 / 120e9
    # the same with LL128, at 92% of the bandwidth, and with LL, at 39 GB/s
    ll128 = 14 * US + 14 * 1.9 * US + 1.75e8 / (0.92 * 120e9)
    assert simple < ll128
    assert collective_seconds("allreduce", 100 * MB, group) == pytest.approx(simple)
    small = 6.6 * US + 14 * 0.6 * US + 1.75e3 / 39e9
    assert collective_seconds("allreduce", 1000, group) == pytest.approx(small)
    middle = 14 * US + 14 * 1.9 * US + 1.75 * 2 * MB / (0.92 * 120e9)
    assert collective_seconds("allreduce", 2 * MB, group) == pytest.approx(middle)


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("network", [Network(LINKS["PCIe3"]), V100, DGX])
def test_more_bytes_and_more_nodes_never_take_less_time(name, network):
    for ranks in (2, 8, 64):
        group = network.group(ranks)
        sizes = [int(1.2**n) for n in range(120)]
        times = [collective_seconds(name, size, group) for size in sizes]
        assert times == sorted(times)
    if network.between:
        times = [
            collective_seconds(name, MB, network.group(8 * n)) for n in (1, 2, 4, 16, 64, 256)
        ]
        assert times == sorted(times)


def test_the_ring_for_large_messages_and_the_tree_for_many_nodes():
    """A ring's latency grows with the ranks, a tree's with the logarithm of the nodes."""

    def faster(nbytes, ranks):
        times = {
            algorithm: collective_seconds("allreduce", nbytes, DGX.group(ranks), algorithm)
            for algorithm in ("ring", "tree")
        }
        best = min(times, key=times.get)
        assert collective_seconds("allreduce", nbytes, DGX.group(ranks)) == times[best]
        return best

    assert faster(1e9, 32) == "ring"
    assert faster(1e6, 1024) == "tree"
    assert faster(1e9, 16384) == "tree"
    crossing = [faster(2.0**n, 256) for n in range(10, 40)]
    assert crossing == sorted(crossing, reverse=True), "tree first, from some size on ring"
    assert {"ring", "tree"} == set(crossing)


def test_who_shares_an_adapter():
    """With an adapter per GPU, twins have its whole bandwidth; with one per node, a part."""
    own = Link("own", 1e9, 0.0, adapter="gpu")
    shared = Link("shared", 1e9, 0.0, adapter="node")
    twins = range(0, 8, 4)
    assert collective_seconds("allreduce", MB, Network(FAST, own, 4).group(twins)) == 1e-3
    assert collective_seconds("allreduce", MB, Network(FAST, shared, 4).group(twins)) == 4e-3
    assert Network(FAST, own, 4).path(0, 1).bandwidth == 1e9
    assert Network(FAST, shared, 4).path(0, 1).bandwidth == 0.25e9
    assert Network(FAST, shared, 4).path(1, 1) is FAST
    # All GPUs of the nodes together have the whole adapter.
    everyone = Network(replace(FAST, bandwidth=1e12), shared, 4).group(8)
    assert everyone.bandwidth == 1e9
    # NCCL's figures are divided, too.
    assert Network(LINKS["NVLink2"], LINKS["Ethernet10"], 2).group([0, 2]).bandwidth == 0.625e9


def test_groups_inside_and_across_nodes():
    network = Network(FAST, SLOW, 4)
    inside = network.group([4, 5, 6, 7])
    across = network.group([0, 4, 8, 12])
    uneven = network.group([0, 1, 2, 4])
    shapes = [(group.ranks, group.nodes, group.per_node) for group in (inside, across, uneven)]
    assert shapes == [(4, 1, 4), (4, 4, 1), (4, 2, 1)]
    assert (inside.bandwidth, across.bandwidth, uneven.bandwidth) == (1e9, 1e8, 1e8)
    assert network.group(16) == network.group(range(16))


def test_a_network_inside_is_the_same_as_nodes_of_one():
    """With link="Ethernet10" and no nodes, each GPU is in a machine of its own."""
    alone = Network(LINKS["Ethernet10"]).group(4)
    nodes = Network(LINKS["NVLink2"], LINKS["Ethernet10"], 1).group(4)
    for name in TRAFFIC:
        times = [collective_seconds(name, 100, group) for group in (alone, nodes)]
        assert times[0] == pytest.approx(times[1])


@pytest.mark.parametrize(
    ("name", "algorithm", "words"),
    [
        ("allsum", None, "'allsum'.*allreduce, allgather"),
        ("allgather", "tree", "allgather.*'tree'.*ring"),
        ("allreduce", "star", "'star'.*ring or tree"),
    ],
)
def test_bad_names(name, algorithm, words):
    with pytest.raises(UserError, match=words):
        collective_seconds(name, MB, DGX.group(16), algorithm)
