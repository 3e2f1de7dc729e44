"""Two namespaces and a cable: what is sent takes at least the time that the cable's rate allows, and nothing stays behind."""

import json
import os
import subprocess
import sys

import pytest

from multigpu import slow_link
from multigpu.errors import UserError

needs_a_link = pytest.mark.skipif(bool(slow_link.obstacle()), reason=str(slow_link.obstacle()))
BYTES = 2_500_000
SENDING = f"""
import json, sys, time, torch, torch.distributed as dist
from multigpu import launch, rendezvous, wire
world = launch.find()
store = rendezvous.meet(world, torch.device("cpu"))
dist.init_process_group("gloo", store=store, rank=world.rank, world_size=2)
parcel = torch.zeros({BYTES}, dtype=torch.uint8)
dist.broadcast(torch.zeros(1), 0)
before, began = wire.sent(), time.perf_counter()
dist.broadcast(parcel, 0)
dist.barrier()
told = [None, None]
dist.all_gather_object(told, (world.nodes, world.rank, wire.sent() - before, time.perf_counter() - began))
if world.rank == 0:
    open(sys.argv[1], "w").write(json.dumps(told))
dist.destroy_process_group()
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_a_link
def test_what_is_sent_takes_the_time_that_the_cable_allows(tmp_path):
    out = tmp_path / "told.json"
    assert (
        slow_link.run([sys.executable, "-c", SENDING, str(out)], megabits=40, seconds=120) == 0
    )
    (nodes, _, sent, took), (_, other, *_) = json.loads(out.read_text())
    assert nodes == 2 and other == 1
    assert BYTES <= sent < 1.02 * BYTES
    assert took > 0.8 * BYTES * 8 / 40e6  # the first 64 KiB pass at once
    assert f"multigpu-{os.getpid()}" not in namespaces()


@needs_a_link
def test_a_rank_that_fails_ends_the_run_and_nothing_stays(tmp_path):
    assert slow_link.run([sys.executable, "-c", "import sys; sys.exit(7)"], megabits=100) == 7
    assert f"multigpu-{os.getpid()}" not in namespaces()


@needs_a_link
def test_a_run_that_does_not_end_is_ended():
    with pytest.raises(UserError, match="has not ended after 1 s"):
        slow_link.run(["sleep", "60"], megabits=100, seconds=1)
    assert f"multigpu-{os.getpid()}" not in namespaces()


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in slow_link.obstacle()


def test_without_the_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt-get install iproute2" in slow_link.obstacle()
