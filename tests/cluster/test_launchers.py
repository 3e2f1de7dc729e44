"""Under every launcher, a script gives the loss of one process, and the library its ranks."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import warm
from commands import SCRIPT, SUPPORT, clean_environment, free_ports, run

LAUNCHED = SUPPORT / "launched.py"


@pytest.fixture
def meeting_point() -> dict[str, object]:
    """Where ranks meet: the variables of env://, with a free port."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}


def mpirun(ranks: int, *command, **environment) -> subprocess.CompletedProcess:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    options = ("--allow-run-as-root", "--oversubscribe", "-np", ranks)
    return run("mpirun", *options, *command, **environment)


# ---- the lesson's script --------------------------------------------------------------------

FLAGS = ("--epochs", 1, "--batch-size", 8)


def loss(out: Path) -> float:
    return json.loads((out / "metrics.json").read_text())["loss"]


@pytest.fixture
def alone(tmp_path: Path, npz) -> tuple[tuple, float]:
    """The flags, and the loss of one process."""
    flags = ("--data", npz(), *FLAGS)
    done = run(warm.python(), SCRIPT, *flags, "--out", tmp_path / "alone")
    assert done.returncode == 0, done.stdout
    return flags, loss(tmp_path / "alone")


def test_one_process_and_mpirun_agree(tmp_path: Path, alone, meeting_point):
    flags, expected = alone
    command = (warm.python(), SCRIPT, *flags, "--out", tmp_path / "mpi")
    done = mpirun(2, *command, **meeting_point)
    assert done.returncode == 0, done.stdout
    assert loss(tmp_path / "mpi") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_on_two_nodes(rendezvous: str, tmp_path: Path, alone, meeting_point):
    """Two torchruns with two ranks each, as on two nodes."""
    flags, expected = alone
    address, port = meeting_point.values()
    options = ["--nnodes=2", "--nproc-per-node=2"]
    if rendezvous == "c10d":
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}"]
        options += ["--rdzv-id=test", "--local-addr=127.0.0.1"]
    else:
        options += [f"--master-addr={address}", f"--master-port={port}"]
    command = [*options, SCRIPT, *flags, "--out", tmp_path / "nodes"]

    def start(node: int) -> subprocess.CompletedProcess:
        own = [] if rendezvous == "c10d" else [f"--node-rank={node}"]
        return run(warm.torchrun(), *own, *command)

    with ThreadPoolExecutor() as pool:
        both = list(pool.map(start, range(2)))
    assert [done.returncode for done in both] == [0, 0], [done.stdout for done in both]
    assert loss(tmp_path / "nodes") == pytest.approx(expected, abs=1e-6)


# ---- the library's launch and rendezvous ----------------------------------------------------


def test_the_library_finds_the_ranks_of_mpirun():
    done = mpirun(2, warm.python(), LAUNCHED)
    assert done.returncode == 0, done.stdout
    assert "2 ranks, started by mpirun, sum 3" in done.stdout, done.stdout


def by_hand(rank: int, size: int, meeting_point: dict) -> subprocess.Popen:
    """One rank, started as in old tutorials: by hand, with the variables of env://."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size} | meeting_point
    return subprocess.Popen(
        [warm.python(), LAUNCHED],
        env=clean_environment(**places),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(100), process.stdout.read()) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_ranks_started_by_hand(meeting_point: dict):
    first, second = ended([by_hand(rank, 2, meeting_point) for rank in (0, 1)])
    assert first[0] == second[0] == 0, (first, second)
    assert "2 ranks" in first[1] and "sum 3" in first[1]


def test_two_processes_that_claim_one_rank(meeting_point: dict):
    """RANK=1 twice: both report it, and rank 0 does not wait for ever."""
    for code, text in ended([by_hand(rank, 3, meeting_point) for rank in (0, 1, 1)]):
        assert code == 2 and "two processes claim rank 1" in text, text
        assert "Traceback" not in text


def test_a_reader_that_closes_the_pipe():
    """… | head -1: the run ends, without a traceback."""
    command = ("python", LAUNCHED, "--endless")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean_environment(), **pipes) as process:
        assert process.stdout.readline().startswith("1 ranks")
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and "Traceback" not in errors, errors
