"""A user's error: one sentence, exit code 2, no traceback, no half-written file, no hang."""

import os
import socket

import pytest
from commands import SUPPORT, run_script, torchrun

from multigpu import launch
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError

SCRIPT = SUPPORT / "library_script.py"


def refused(done, *words: str) -> None:
    assert done.returncode == 2, done.stdout
    complaints = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1, f"one sentence, printed once, not:\n{done.stdout}"
    for word in words:
        assert word in complaints[0]
    assert "Traceback" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data", "nowhere.npz"), ("no data file nowhere.npz",)),
        (("--data", "http://127.0.0.1:9/x.npz"), ("cannot download", "beforehand")),
        (("--out", SCRIPT / "out"), ("cannot write", "--out")),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else None,
)
def test_flags(tmp_path, flags, words):
    refused(run_script(SCRIPT, "--out", tmp_path / "out", *flags, cwd=tmp_path), *words)
    assert not (tmp_path / "out" / "metrics.json").exists()


@pytest.mark.slow
def test_under_torchrun_a_mistake_is_reported_once(tmp_path):
    done = torchrun(2, SCRIPT, "--data", "nowhere.npz", "--out", tmp_path)
    words = "error: there is no data file nowhere.npz"
    assert done.returncode != 0 and done.stdout.count(words) == 1, done.stdout
    assert "UserError" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can hide a folder from itself by mounting it read-only",
)
def test_out_on_a_read_only_place():
    refused(run_script(SCRIPT, "--out", "/proc/sys/out"), "cannot write", "--out")


INTERACTIVE = {
    "SLURM_JOB_ID": 7,
    "SLURM_NTASKS": 4,
    "SLURM_PROCID": 0,
    "SLURM_LOCALID": 0,
    "SLURM_JOB_NAME": "bash",
}


@pytest.mark.slow
def test_slurm_variables_of_an_interactive_shell(tmp_path, npz):
    flags = ("--data", npz(), "--out", tmp_path)
    refused(run_script(SCRIPT, *flags, **INTERACTIVE), "4 tasks", "srun python", "torchrun")
    assert run_script(SCRIPT, *flags, **INTERACTIVE | {"SLURM_NTASKS": 1}).returncode == 0


def own_rank() -> int:
    return launch.find_world().rank


def test_ranks_in_a_step_of_one_task(monkeypatch):
    """A terminal of JupyterLab that srun started: one task, with any number of GPUs."""
    step = {
        "SLURM_JOB_ID": 7,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NTASKS": 1,
        "SLURM_STEP_NUM_TASKS": 1,
        "SLURM_GPUS_ON_NODE": 2,
        "SLURM_CLUSTER_NAME": CLASSROOM,
        "SLURM_STEP_TASKS_PER_NODE": 1,
    }
    for name, value in step.items():
        monkeypatch.setenv(name, str(value))
    assert launch.call(own_rank, 2) == [0, 1]


def test_ranks_of_a_rank_are_refused(monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="has started 2 already: start it as one process"):
        launch.call(own_rank, 2)


def test_a_port_that_is_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"cannot bind port {port}, which is in use"):
            launch.call(own_rank, 2)
