"""A slow link limits the rate of what is sent, and is removed completely afterwards."""

import json
import os
import subprocess
import sys

import pytest

from multigpu.errors import UserError
from multigpu.network import slow_link

needs_a_link = pytest.mark.skipif(
    bool(slow_link.unavailable_reason()), reason=str(slow_link.unavailable_reason())
)
BYTES = 2_500_000
SENDING = f"""
import json, sys, time, torch, torch.distributed as dist
from multigpu import launch
from multigpu.launch import rendezvous
from multigpu.network import wire
world = launch.find_world()
store = rendezvous.open_store(world, torch.device("cpu"))
dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
message = torch.zeros({BYTES}, dtype=torch.uint8)
dist.broadcast(torch.zeros(1), 0)
before, began = wire.bytes_sent(), time.perf_counter()
dist.broadcast(message, 0)
dist.barrier()
seconds = time.perf_counter() - began
results = [None, None]
dist.all_gather_object(results, (world.nodes, world.rank, wire.bytes_sent() - before, seconds))
if world.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(results))
dist.destroy_process_group()
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.long
@needs_a_link
def test_sending_takes_the_time_that_the_link_allows(tmp_path):
    out = tmp_path / "results.json"
    assert (
        slow_link.run([sys.executable, "-c", SENDING, str(out)], megabits=40, seconds=120) == 0
    )
    (nodes, _, sent, took), (_, other, *_) = json.loads(out.read_text())
    assert nodes == 2 and other == 1
    assert BYTES <= sent < 1.02 * BYTES
    assert took > 0.8 * BYTES * 8 / 40e6  # the first 64 KiB pass at once
    assert f"multigpu-{os.getpid()}" not in namespaces()


@needs_a_link
def test_a_rank_that_fails_ends_the_run_and_the_link_is_removed(tmp_path):
    assert slow_link.run([sys.executable, "-c", "import sys; sys.exit(7)"], megabits=100) == 7
    assert f"multigpu-{os.getpid()}" not in namespaces()


@needs_a_link
def test_a_run_that_takes_too_long_is_ended():
    with pytest.raises(UserError, match="has not ended after 1 s"):
        slow_link.run(["sleep", "60"], megabits=100, seconds=1)
    assert f"multigpu-{os.getpid()}" not in namespaces()


def test_without_root_it_names_root(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in slow_link.unavailable_reason()


def test_without_the_tools_it_names_the_package(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt-get install iproute2" in slow_link.unavailable_reason()
