"""Times and traffic of transfers and collectives, in one node and across nodes."""

from dataclasses import replace

import pytest
import torch
from compare_devices import CABLE, ROUND, last, seconds
from virtual_ranks import run_ranks
from virtual_runs import TORCHRUN, reported, virtual, write

from multigpu import LINKS, Link
from multigpu.errors import UserError
from multigpu.virtual import control
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.network import (
    TRAFFIC,
    Network,
    collective_seconds,
    host_copy_seconds,
    sent_bytes,
)
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

MB = 10**6
# Links without NCCL's figures: every step takes the latency, so times can be computed by hand.
FAST = Link("fast", bandwidth=1e9, latency=1e-5)
SLOW = Link("slow", bandwidth=1e8, latency=1e-3, adapter="gpu")
DGX = Network(LINKS["NVLink4"], LINKS["NDR400"], 8)
V100 = Network(LINKS["NVLink2"], LINKS["HDR200"], 8)
US = 1e-6


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


# ---- virtual GPUs on several nodes ----

# 10 MB/s and 10 ms between nodes, for each GPU.
TEN_MB_A_SECOND = Link("slow", bandwidth=1e7, latency=1e-2, adapter="gpu")
NODES = {"gpu": ROUND, "link": CABLE, "gpus_per_node": 2, "between_nodes": TEN_MB_A_SECOND}


def copy_seconds(source: torch.device, destination: torch.device) -> float:
    torch.zeros(250_000, device=source).to(destination)
    return seconds(last("transfer"))


def test_a_transfer_between_two_nodes_takes_the_network():
    with control.running(count=4, **NODES) as devices:
        inside = copy_seconds(devices[0], devices[1])
        assert inside == pytest.approx(copy_seconds(devices[3], devices[2]))
        across = copy_seconds(devices[1], devices[2])
        assert across == pytest.approx(copy_seconds(devices[0], devices[3]))
        upload = copy_seconds("cpu", devices[3])
    assert inside == pytest.approx(1e-3 + 1e-3)
    assert across == pytest.approx(1e-2 + 1e-1)
    assert upload == pytest.approx(host_copy_seconds(1e6, LINKS["PCIe3"], False))


def test_the_label_names_both_links():
    with control.running(4, gpus_per_node=2, between_nodes="Ethernet10", compute=False):
        label = "simulated: 4 × V100-16GB, 2 per node: NVLink2 inside, Ethernet10 between"
        assert control.label() == label == control.timeline().label


@pytest.mark.parametrize(
    ("count", "per_node", "rank", "nodes"),
    [
        # one GPU per rank: rank r is on node r // gpus_per_node
        (1, 2, 0, [0]),
        (1, 2, 3, [1]),
        # two ranks fill a node
        (2, 4, 2, [1, 1]),
        # a rank is a node
        (2, 2, 1, [1, 1]),
        # a rank sees two nodes
        (4, 2, 1, [0, 0, 1, 1]),
        (2, None, 5, [0, 0]),
    ],
)
def test_the_node_of_a_ranks_device(count, per_node, rank, nodes):
    more = {"gpus_per_node": per_node, "between_nodes": TEN_MB_A_SECOND} if per_node else {}
    with control.running(count, compute=False, **more):
        places = [machine.current().node(index, rank) for index in range(count)]
    assert places == nodes


TWO_DEVICES = """
placement = sys.argv[3]
# Each rank sees the four GPUs of both nodes, and uses two of them.
gpus = control.start(4, gpus_per_node=2, between_nodes="HDR200", compute=False)
own = gpus[2 * rank : 2 * rank + 2] if placement == "a node each" else gpus[rank::2]
join()
works = []
for device in own:
    works.append(dist.all_reduce(torch.zeros(25_000_000, device=device), async_op=True))
for work in works:
    work.wait()
events = [event for event in control.timeline().events if event.kind == "collective"]
print(json.dumps([(event.start, event.end) for event in events]))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["a node each", "half of each node"])
def test_ranks_with_two_gpus_each(tmp_path, placement):
    """The node of a rank's device decides, and the two devices' all-reduces overlap."""
    zero, one = run_ranks(TWO_DEVICES, 2, tmp_path, placement)
    assert zero == one
    network = Network(LINKS["NVLink2"], LINKS["HDR200"], 2)
    twins = [0, 2] if placement == "a node each" else [0, 1]
    seconds = collective_seconds("allreduce", 100_000_000, network.group(twins))
    (start, end), (other_start, other_end) = zero
    for span in (end - start, other_end - other_start):
        assert span == pytest.approx(seconds + KERNEL_OVERHEAD)
    assert other_start < start + 1e-4, "each device has its own communicator"


# ---- the table of traffic ----

TRAFFIC_OF_RANKS = """
import os

import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.ones(2**18, device="cuda")
dist.all_reduce(x)
if rank == 0:
    dist.send(x, 1)
if rank == 1:
    dist.recv(x, 0)
pair = dist.new_group([1, 3])
if rank in (1, 3):
    dist.broadcast(x, 3, group=pair)
# Rank r sends (r + 1) (s + 1) numbers to rank s.
parts = [torch.ones((rank + 1) * (s + 1), device="cuda") for s in range(4)]
dist.all_to_all([torch.empty((rank + 1) * (s + 1), device="cuda") for s in range(4)], parts)
dist.destroy_process_group()
"""


def test_the_traffic_of_pairs_of_ranks_and_of_nodes(tmp_path):
    flags = "--gpus 4 --gpus-per-node 2 --between-nodes HDR200 --traffic"
    launcher = (*TORCHRUN, "--nproc-per-node=4")
    program = write(tmp_path, TRAFFIC_OF_RANKS)
    text, numbers = reported(tmp_path, *flags.split(), *launcher, program)
    flows = numbers["traffic"]
    sent = {(flow["source"], flow["destination"]): flow["bytes"] for flow in flows}
    small = {(r, s): 4 * (r + 1) * (s + 1) for r in range(4) for s in range(4) if r != s}
    # The all-reduce of 1 MiB; the message; the broadcast from rank 3 to rank 1.
    large = {(0, 1): 1.5 + 1, (1, 2): 1.5, (2, 3): 1.5, (3, 0): 1.5, (3, 1): 1}
    assert sent == {
        (f"rank {r}", f"rank {s}"): nbytes + large.get((r, s), 0) * 2**20
        for (r, s), nbytes in small.items()
    }
    assert all(
        (flow["source_node"], flow["destination_node"])
        == tuple(int(flow[end].split()[1]) // 2 for end in ("source", "destination"))
        for flow in flows
    )
    assert "rank 0 → rank 1" in text
    assert "all of node 1 → node 0" in text


def test_the_traffic_of_one_process(tmp_path):
    program = "import torch\nx = torch.ones(256).to('cuda:0')\nx.to('cuda:1').cpu()\n"
    done = virtual(tmp_path, "--traffic", write(tmp_path, program))
    rows = [line for line in done.stdout.splitlines() if " → " in line]
    assert [row.split("  ")[0] for row in rows] == [
        "host → cuda:0", "cuda:0 → cuda:1", "cuda:1 → host"
    ]  # fmt: skip
    assert all("1.00 KiB" in row for row in rows)


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_ranks_together_send_what_the_links_carry(name):
    ranks, root = 4, 2
    sent = [sent_bytes(name, 400, rank, ranks, root) for rank in range(ranks)]
    assert all(rank not in to for rank, to in enumerate(sent))
    total = sum(sum(to.values()) for to in sent)
    # Each rank of a ring sends as much as a link carries; with a root there is no ring.
    links = {"broadcast": 3, "reduce": 3, "gather": 1, "scatter": 1}.get(name, 4)
    assert total == links * 400 * TRAFFIC[name](ranks)
