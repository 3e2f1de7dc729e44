"""The table of traffic: who sends how many bytes to whom."""

import json

import pytest
from virtual_runs import TORCHRUN, virtual, write

from multigpu.virtual.sim.network import TRAFFIC, sent_bytes

MIB = 2**20
PROGRAM = """
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


def test_pairs_of_ranks_and_of_nodes(tmp_path):
    flags = "--gpus 4 --gpus-per-node 2 --between-nodes HDR200 --traffic --json numbers.json"
    launcher = (*TORCHRUN, "--nproc-per-node=4")
    done = virtual(tmp_path, *flags.split(), *launcher, write(tmp_path, PROGRAM))
    assert done.returncode == 0, done.stdout
    flows = json.loads((tmp_path / "numbers.json").read_text())["traffic"]
    sent = {(flow["source"], flow["destination"]): flow["bytes"] for flow in flows}
    small = {(r, s): 4 * (r + 1) * (s + 1) for r in range(4) for s in range(4) if r != s}
    # The all-reduce of 1 MiB; the message; the broadcast from rank 3 to rank 1.
    large = {(0, 1): 1.5 + 1, (1, 2): 1.5, (2, 3): 1.5, (3, 0): 1.5, (3, 1): 1}
    assert sent == {
        (f"rank {r}", f"rank {s}"): nbytes + large.get((r, s), 0) * MIB
        for (r, s), nbytes in small.items()
    }
    assert all(
        (flow["source_node"], flow["destination_node"])
        == tuple(int(flow[end].split()[1]) // 2 for end in ("source", "destination"))
        for flow in flows
    )
    assert "rank 0 → rank 1" in done.stdout
    assert "all of node 1 → node 0" in done.stdout


def test_copies_of_one_process(tmp_path):
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
