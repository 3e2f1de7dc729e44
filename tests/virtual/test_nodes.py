"""Virtual GPUs on several nodes: transfers and collectives inside and across the nodes."""

import pytest
import torch
from compare_devices import CABLE, ROUND, last
from virtual_ranks import run_ranks

from multigpu import LINKS, Link
from multigpu.virtual import control
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.network import (
    Network,
    collective_seconds,
    host_copy_seconds,
)
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD

# 10 MB/s and 10 ms between nodes, for each GPU.
SLOW = Link("slow", bandwidth=1e7, latency=1e-2, adapter="gpu")
NODES = {"gpu": ROUND, "link": CABLE, "gpus_per_node": 2, "between_nodes": SLOW}


def copy_seconds(source: torch.device, destination: torch.device) -> float:
    torch.zeros(250_000, device=source).to(destination)
    event = last("transfer")
    return event.end - event.start


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
        (1, 2, 1, [0]),
        (1, 2, 3, [1]),
        # two ranks fill a node
        (2, 4, 1, [0, 0]),
        (2, 4, 2, [1, 1]),
        # a rank is a node
        (2, 2, 1, [1, 1]),
        # a rank sees two nodes
        (4, 2, 0, [0, 0, 1, 1]),
        (4, 2, 1, [0, 0, 1, 1]),
        (2, None, 5, [0, 0]),
    ],
)
def test_the_node_of_a_ranks_device(count, per_node, rank, nodes):
    more = {"gpus_per_node": per_node, "between_nodes": SLOW} if per_node else {}
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
