"""One script, unchanged, under every launcher: all give the loss of the one-process run."""

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import SCRIPT, clean_environment, run
from multigpu import world

FLAGS = ("--epochs", 1, "--batch-size", 8, "--prove")


def losses(folder) -> tuple[int, float]:
    told = json.loads((folder / "metrics.json").read_text())
    return told["world_size"], told["loss"]


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
    return run(
        "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", ranks, "python", SCRIPT, *flags, **environment
    )


def test_one_process_mpirun_and_spawn_agree(tmp_path, expected):
    flags, loss = expected
    for name, start in {
        "mpirun": lambda out: mpirun(2, *flags, "--out", out),
        "spawn": lambda out: run("python", SCRIPT, "--spawn", "2", *flags, "--out", out),
    }.items():
        done = start(tmp_path / name)
        assert done.returncode == 0, done.stdout
        assert "holds" in done.stdout and f"started by {'--spawn' if name == 'spawn' else name}" in done.stdout
        size, found = losses(tmp_path / name)
        assert size == 2 and found == pytest.approx(loss, abs=1e-6)


def test_torchrun_on_two_nodes(tmp_path, expected):
    """Two torchruns that meet by the c10d rendezvous, two ranks each, as on two nodes."""
    flags, loss = expected
    port = world.port_candidates("two nodes")[0]
    command = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    command += ["--rdzv-id=test", SCRIPT, *flags, "--out", tmp_path / "nodes"]
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: run(*command), range(2)))
    assert [done.returncode for done in both] == [0, 0], "\n".join(done.stdout for done in both)
    assert "4 ranks on 2 nodes, started by torchrun" in both[0].stdout + both[1].stdout
    size, found = losses(tmp_path / "nodes")
    assert size == 4 and found == pytest.approx(loss, abs=1e-6)


def by_hand(rank: int, size: int, flags: tuple, **environment) -> subprocess.Popen:
    """One rank, started the way old tutorials do: by hand, with the variables of env://."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"} | environment
    command = [str(part) for part in ("python", SCRIPT, *flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=clean_environment(**places), **pipes)


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(100), process.stdout.read()) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_ranks_started_by_hand(tmp_path, expected):
    flags, loss = expected
    both = [by_hand(rank, 2, (*flags, "--out", tmp_path / "hand"), MASTER_PORT=26123) for rank in (0, 1)]
    assert [code for code, _ in ended(both)] == [0, 0]
    assert losses(tmp_path / "hand") == (2, pytest.approx(loss, abs=1e-6))


def test_two_processes_that_claim_one_rank(tmp_path, npz):
    """RANK=1 twice: both say so, and rank 0 does not wait for ever."""
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path)
    three = [by_hand(rank, 3, flags, MASTER_PORT=26124) for rank in (0, 1, 1)]
    for code, text in ended(three):
        assert code == 2 and "two processes claim rank 1" in text and "Traceback" not in text, text


def test_two_processes_that_claim_rank_0(tmp_path, npz):
    flags = ("--data", npz(), *FLAGS, "--out", tmp_path)
    first = by_hand(0, 2, flags, MASTER_PORT=26125)
    code, text = ended([by_hand(0, 2, flags, MASTER_PORT=26125)])[0] if _listens(26125) else (None, "no listener")
    first.kill()
    assert code == 2 and "two processes claim rank 0" in text and "Traceback" not in text, text


def _listens(port: int) -> bool:
    import socket
    import time

    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    return False
