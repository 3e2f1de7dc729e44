"""Elastic runs whose faults take longer than `make test` can wait: `make test-faults`."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import faults
import pytest
import warm
from commands import ROOT, clean_environment, free_ports

SCRIPT = ROOT / "scripts" / "PT_CNN_Elastic.py"

# A rank that is alone waits until its torchrun ends it, because a second node has come, or has
# died. Then both join, and end.
JOINS = """
import os
import time
import torch
from multigpu import launch
from multigpu.launch import rendezvous

def main(args):
    world = launch.find_world()
    print(f"rank {world.rank} of {world.size} starts", flush=True)
    parent = os.getppid()
    while world.size == 1 and os.getppid() == parent:
        time.sleep(0.05)
    rendezvous.open_store(world, torch.device("cpu"), join_timeout=4)
    print(f"rank {world.rank} of {world.size} has joined", flush=True)

if __name__ == "__main__":
    launch.start(main, None)
"""


class Nodes:
    """The `torchrun`s of a run with one node or two, with one rank each, and their log."""

    def __init__(self, log: Path, *command: object, restarts: int = 0, **environment: object):
        self.log = log
        self.command = command
        self.restarts = restarts
        self.environment = clean_environment(OMP_NUM_THREADS=1, **environment)
        self.agents: list[subprocess.Popen] = []
        (self.port,) = free_ports(1)
        log.write_text("")

    def add(self, address: str, config: str) -> None:
        """Start one more `torchrun`; the first one hosts the rendezvous."""
        command = [
            warm.torchrun(),
            "--nnodes=1:2",
            f"--max-restarts={self.restarts}",
            f"--local-addr={address}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            "--rdzv-id=nodes",
            f"--rdzv-conf=is_host={int(not self.agents)},{config}",
            *self.command,
        ]
        with open(self.log, "a") as file:
            self.agents.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_for(self, words: str) -> None:
        """Wait until the words are in the log. The first `torchrun` must not end before."""
        while words not in self.log.read_text():
            assert self.agents[0].poll() is None, self.log.read_text()
            time.sleep(0.05)

    def wait(self) -> None:
        """Wait until all `torchrun`s have ended, at most 90 s for each."""
        for agent in self.agents:
            agent.wait(90)


@contextmanager
def nodes(log: Path, *command: object, **keywords: object) -> Iterator[Nodes]:
    """Nodes(log, *command, **keywords); whatever happens, no `torchrun` is left at the end."""
    found = Nodes(log, *command, **keywords)
    try:
        yield found
    finally:
        for agent in found.agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()


def two_nodes(folder: Path, addresses: tuple[str, str], **environment: object) -> str:
    """The second node comes when the first one has started alone. Returns what both print."""
    (folder / "joins.py").write_text(JOINS)
    with nodes(folder / "log.txt", folder / "joins.py", **environment) as run:
        for address in addresses:
            run.add(address, "last_call_timeout=1,read_timeout=5")
            run.wait_for("rank 0 of 1 starts")
        run.wait()
    return run.log.read_text()


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_a_node_comes(tmp_path, addresses):
    """Also if its address comes before the first node's: then it becomes rank 0."""
    text = two_nodes(tmp_path, addresses, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    assert text.count("of 2 has joined") == 2, text


def test_without_the_variable_a_node_that_becomes_rank_0_is_never_found(tmp_path):
    """torch 2.13: the first node's ranks get their node's address, which is not rank 0's now.

    DynamicRendezvousHandler.next_rendezvous keeps the address of the first start. The ranks
    end with a sentence.
    """
    text = two_nodes(tmp_path, ("127.0.0.2", "127.0.0.1"))
    assert "rank 0 of 2 starts" in text and "of 2 has joined" not in text
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


def test_without_the_variable_torchrun_does_not_get_the_first_nodes_address(tmp_path):
    """torch 2.13: only a rank 0 that is new writes its address. No rank is started again.

    The second torchrun waits in RendezvousStoreInfo.build, the first one in
    _assign_worker_ranks, until the read_timeout of --rdzv-conf; then both end.
    """
    text = two_nodes(tmp_path, ("127.0.0.1", "127.0.0.2"))
    assert "of 2 starts" not in text
    assert "DistStoreError" in text, text


def test_a_killed_rendezvous_host_ends_the_other_node_too(tmp_path):
    """The host's ranks save, because their launcher has died, and the next start goes on."""
    fault = faults.Fault(0, 2, 2, "host", "SIGKILL", "step", 7, 0.0, 0, False)
    found = faults.run_fault(fault, tmp_path)
    assert found["killed"] and found["launches"] == 2
    assert "Rendezvous" in (tmp_path / "log-1-1").read_text()


def test_a_stop_before_the_first_step_on_two_nodes(tmp_path):
    """SIGUSR1 to a rank of one node ends the ranks of both, and both torchruns, with 0."""
    fault = faults.Fault(0, 2, 2, "worker", "SIGUSR1", "ready", 1, 0.0, 1, False)
    found = faults.run_fault(fault, tmp_path)
    assert found["killed"] and found["launches"] == 2 and found["sizes"] == [2]
    assert faults.logs(tmp_path, 1).count("SIGUSR1 after step") == 1


@pytest.mark.parametrize(("moment", "rank"), [("start", 0), ("start", 1), ("join", 1)])
def test_a_rank_of_two_nodes_that_is_killed_before_it_has_joined(tmp_path, moment, rank):
    """The torchrun of the other node starts its rank again without counting a restart."""
    fault = faults.Fault(0, 2, 2, "worker", "SIGKILL", moment, 1, 0.0, rank, False)
    found = faults.run_fault(fault, tmp_path)
    assert found["killed"] and found["launches"] == 1


def test_a_node_comes_and_goes(tmp_path):
    """The commands of the lesson's page: one rank, two, and one again, equal one process."""
    out = tmp_path / "out"
    flags = ("--out", out, "--epochs", 40, "--pause", 0.004, "--prove")
    # If the time is too short, the agents of a busy machine miss each other, and each one's
    # new world restarts the other's.
    config = "last_call_timeout=5"
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
    with nodes(tmp_path / "log.txt", SCRIPT, *flags, restarts=3, **shared) as run:
        run.add("127.0.0.1", config)
        run.wait_for("start 1:")
        run.add("127.0.0.1", config)
        run.wait_for("start 2:")
        time.sleep(2)
        run.agents[1].send_signal(signal.SIGTERM)  # as when a node is taken away
        run.wait()
    text = run.log.read_text()
    assert run.agents[0].returncode == 0, text
    sizes = [size for _, size, _ in json.loads((out / "metrics.json").read_text())["curve"]]
    assert [size for size, _ in groupby(sizes)] == [1, 2, 1]
    assert "1 and 2 ranks, 3 starts, equal 1 rank without a stop" in text and "holds" in text
