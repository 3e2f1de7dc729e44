"""A user's error: one sentence, exit code 2, no traceback, no half-written file, no hang."""

import argparse
import os
import socket

import pytest
from commands import SUPPORT, run_script, torchrun

from multigpu import flags
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError

SCRIPT = SUPPORT / "library_script.py"
TINY = ("--epochs", 1, "--batch-size", 8)


def refused(done, *words: str) -> None:
    assert done.returncode == 2, done.stdout
    complaints = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1, f"one sentence, printed once, not:\n{done.stdout}"
    for word in words:
        assert word in complaints[0]
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("0", flags.positive, "from 1 up"),
        ("ten", flags.positive, "from 1 up"),
        (str(10**20), flags.positive, "at most 2147483647"),
        ("1" + 5000 * "0", flags.positive, "at most 2147483647"),
        (str(10**20), flags.seed, "at most 4294967295"),
        (str(-(10**20)), flags.seed, "too small: give at least -4294967295"),
        ("x", flags.seed, "'x' is not a whole number"),
        ("-1", flags.positive_float, "greater than 0"),
    ],
)
def test_a_number_that_a_flag_refuses(value, kind, words):
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        kind(value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((3, 4), ("--batch-size 3", "4 ranks", "give 4")),
        ((8, 2, 3), ("2 ranks × 3 micro-batches", "give 6")),
    ],
)
def test_a_batch_that_cannot_be_split(parts, words):
    with pytest.raises(UserError) as error:
        flags.split_batch(*parts)
    assert all(word in str(error.value) for word in words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spawn", 0), ("at least one process",)),
        (("--spawn", "many"), ("--spawn many", "'auto'")),
        (("--spawn", 2, "--data", "nowhere.npz"), ("no data file nowhere.npz",)),
        (
            ("--spawn", 2, "--data", "http://127.0.0.1:9/x.npz"),
            ("cannot download", "beforehand"),
        ),
        (("--spawn", 2, "--lr", "3e38", *TINY), ("lower --lr",)),
        (("--spawn", 2, "--out", SCRIPT / "out"), ("cannot write", "--out")),
    ],
    ids=lambda value: " ".join(map(str, value[:4])) if isinstance(value, tuple) else None,
)
def test_flags(tmp_path, flags, words):
    refused(run_script(SCRIPT, "--out", tmp_path / "out", *flags, cwd=tmp_path), *words)
    assert not (tmp_path / "out" / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--epochs", 0), "from 1 up"),
        (("--spawn", 2), "use one of the two"),
        (("--data", "nowhere.npz"), "error: there is no data file nowhere.npz"),
    ],
)
def test_under_torchrun_a_mistake_is_reported_once(tmp_path, flags, words):
    done = torchrun(2, SCRIPT, *flags, "--out", tmp_path)
    assert done.returncode != 0 and done.stdout.count(words) == 1, done.stdout
    assert "UserError" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can hide a folder from itself by mounting it read-only",
)
def test_out_on_a_read_only_place():
    refused(run_script(SCRIPT, "--out", "/proc/sys/out"), "cannot write", "--out")


@pytest.mark.slow
def test_a_port_in_use_that_was_given(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = run_script(SCRIPT, "--spawn", 2, "--out", tmp_path, MASTER_PORT=port)
        refused(done, f"cannot bind port {port}", "in use")


INTERACTIVE = {
    "SLURM_JOB_ID": 7,
    "SLURM_NTASKS": 4,
    "SLURM_PROCID": 0,
    "SLURM_LOCALID": 0,
    "SLURM_JOB_NAME": "bash",
}


@pytest.mark.slow
def test_slurm_variables_of_an_interactive_shell(tmp_path, npz):
    flags = ("--data", npz(), *TINY, "--out", tmp_path)
    refused(run_script(SCRIPT, *flags, **INTERACTIVE), "4 tasks", "srun python", "--spawn 1")
    assert run_script(SCRIPT, *flags, "--spawn", 1, **INTERACTIVE).returncode == 0, (
        "the advice works"
    )
    assert run_script(SCRIPT, *flags, **INTERACTIVE | {"SLURM_NTASKS": 1}).returncode == 0


@pytest.mark.slow
def test_spawn_in_a_step_of_one_task(tmp_path, npz):
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
    done = run_script(SCRIPT, "--spawn", 2, "--data", npz(), *TINY, "--out", tmp_path, **step)
    assert done.returncode == 0, done.stdout
