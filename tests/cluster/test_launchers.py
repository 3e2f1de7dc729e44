"""One script, unchanged, under every launcher: each gives the loss of one process."""

import json
import os
import pty
import shutil
import socket
import subprocess
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from commands import SCRIPT, clean_environment, free_ports, run

from multigpu.launch import world

FLAGS = ("--epochs", 1, "--batch-size", 8, "--prove")


def losses(folder) -> tuple[int, float]:
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics["world_size"], metrics["loss"]


@pytest.fixture
def expected(tmp_path, npz) -> tuple[tuple, float]:
    flags = ("--data", npz(), *FLAGS)
    done = run("python", SCRIPT, *flags, "--out", tmp_path / "alone")
    assert done.returncode == 0, done.stdout
    size, loss = losses(tmp_path / "alone")
    assert size == 1
    return flags, loss


def mpirun(ranks: int, *flags, **environment):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    command = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", ranks)
    return run(*command, "python", SCRIPT, *flags, **environment)


def test_one_process_mpirun_and_spawn_agree(tmp_path, expected):
    flags, loss = expected
    for name, start in {
        "mpirun": lambda out: mpirun(2, *flags, "--out", out),
        "spawn": lambda out: run("python", SCRIPT, "--spawn", "2", *flags, "--out", out),
    }.items():
        done = start(tmp_path / name)
        assert done.returncode == 0, done.stdout
        launcher = "--spawn" if name == "spawn" else name
        assert "holds" in done.stdout and f"started by {launcher}" in done.stdout
        size, found = losses(tmp_path / name)
        assert size == 2 and found == pytest.approx(loss, abs=1e-6)


def test_torchrun_on_two_nodes(tmp_path, expected):
    """Two torchruns with the c10d rendezvous and two ranks each, as on two nodes."""
    flags, loss = expected
    port = world.port_candidates("two nodes")[0]
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test")
    command = ["torchrun", "--nnodes=2", "--nproc-per-node=2", *rendezvous]
    command += [SCRIPT, *flags, "--out", tmp_path / "nodes"]
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: run(*command), range(2)))
    assert [done.returncode for done in both] == [0, 0], "\n".join(
        done.stdout for done in both
    )
    assert "4 ranks on 2 nodes, started by torchrun" in both[0].stdout + both[1].stdout
    size, found = losses(tmp_path / "nodes")
    assert size == 4 and found == pytest.approx(loss, abs=1e-6)


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def by_hand(rank: int, size: int, flags: tuple, **environment) -> subprocess.Popen:
    """One rank, started as in old tutorials: by hand, with the variables of env://."""
    places = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
    } | environment
    command = [str(part) for part in ("python", SCRIPT, *flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=clean_environment(**places), **pipes)


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(100), process.stdout.read()) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_ranks_started_by_hand(tmp_path, expected, free_port):
    flags, loss = expected
    both = [
        by_hand(rank, 2, (*flags, "--out", tmp_path / "hand"), MASTER_PORT=free_port)
        for rank in (0, 1)
    ]
    assert [code for code, _ in ended(both)] == [0, 0]
    assert losses(tmp_path / "hand") == (2, pytest.approx(loss, abs=1e-6))


def test_two_processes_that_claim_one_rank(tmp_path, npz, free_port):
    """RANK=1 twice: both report it, and rank 0 does not wait for ever."""
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path)
    three = [by_hand(rank, 3, flags, MASTER_PORT=free_port) for rank in (0, 1, 1)]
    for code, text in ended(three):
        assert (
            code == 2 and "two processes claim rank 1" in text and "Traceback" not in text
        ), text


def test_two_processes_that_claim_rank_0(tmp_path, npz, free_port):
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path)
    first = by_hand(0, 2, flags, MASTER_PORT=free_port)
    try:
        assert _listens(free_port)
        ((code, text),) = ended([by_hand(0, 2, flags, MASTER_PORT=free_port)])
    finally:
        first.kill()
    assert code == 2 and "two processes claim rank 0" in text and "Traceback" not in text, text


def _listens(port: int) -> bool:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    return False


def test_a_bar_on_a_terminal_and_lines_in_a_log(tmp_path, npz):
    command = [
        str(part) for part in ("python", SCRIPT, "--data", npz(), *FLAGS, "--out", tmp_path)
    ]
    assert "it/s" not in run(*command).stdout
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with subprocess.Popen(command, env=clean_environment(), stdout=terminal, stderr=terminal):
        os.close(terminal)
        shown = b""
        # Linux raises OSError when the other side has closed.
        with suppress(OSError):
            while part := os.read(master, 1000):
                shown += part
    os.close(master)
    assert b"it/s" in shown and b"holds" in shown, shown


@pytest.mark.parametrize("spawn", [None, "2"])
def test_another_broken_pipe_is_an_ordinary_error(tmp_path, spawn):
    (tmp_path / "pipe.py").write_text(
        "import argparse\nfrom multigpu import launch\n"
        "def main(args):\n    raise BrokenPipeError(32, 'a socket')\n"
        "if __name__ == '__main__':\n"
        f"    launch.start(main, argparse.Namespace(spawn={spawn!r}))\n"
    )
    done = run("python", tmp_path / "pipe.py")
    assert done.returncode == 1 and "BrokenPipeError: [Errno 32] a socket" in done.stdout, (
        done.stdout
    )


def test_a_reader_that_closes_the_pipe(tmp_path, npz):
    """… | head -1: the run ends, without a traceback."""
    flags = (
        "--spawn",
        2,
        "--data",
        npz(),
        "--epochs",
        50,
        "--batch-size",
        8,
        "--out",
        tmp_path,
    )
    command = [str(part) for part in ("python", SCRIPT, *flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean_environment(), **pipes) as process:
        assert process.stdout.readline().startswith("device:")
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and "Traceback" not in errors, errors
