"""A user's error: one sentence, exit code 2, no traceback, no half-written file, no hang."""

import os
import socket
import sys

import numpy as np
import pytest
import torch
from commands import INSTRUMENTED, SCRIPT, run, run_script, torchrun

from multigpu.devices import CLASSROOM

pytestmark = pytest.mark.slow

TINY = ("--epochs", 1, "--batch-size", 8)


def refused(done, *words: str) -> None:
    assert done.returncode == 2, done.stdout
    complaints = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(complaints) == 1, f"one sentence, printed once, not:\n{done.stdout}"
    for word in words:
        assert word in complaints[0]
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--spawn", 0), ("at least one process",)),
        (("--spawn", "many"), ("--spawn many", "'auto'")),
        (("--spawn", 4, "--batch-size", 3), ("--batch-size 3", "4 ranks", "give 4")),
        (
            ("--spawn", 2, "--batch-size", 8, "--accumulate", 3),
            ("2 ranks × 3 micro-batches", "give 6"),
        ),
        (("--batch-size", 0), ("--batch-size", "from 1 up")),
        (("--epochs", "ten"), ("--epochs", "from 1 up")),
        (("--batch-size", 10**20), ("--batch-size", "at most 2147483647")),
        (("--epochs", "1" + 5000 * "0"), ("--epochs", "at most 2147483647")),
        (("--seed", 10**20), ("--seed", "at most 4294967295")),
        (("--seed", -(10**20)), ("--seed", "too small: give at least -4294967295")),
        (("--seed", "x"), ("--seed", "'x' is not a whole number")),
        (("--lr", -1), ("--lr", "greater than 0")),
        (("--spawn", 2, "--data", "nowhere.npz"), ("no data file nowhere.npz",)),
        (
            ("--spawn", 2, "--data", "http://127.0.0.1:9/x.npz"),
            ("cannot download", "beforehand"),
        ),
        (("--spawn", 2, *TINY, "--resume", "nowhere.pt"), ("no checkpoint nowhere.pt",)),
        (("--spawn", 2, "--lr", "3e38", *TINY), ("lower --lr",)),
        (("--amp", "--prove"), ("--prove", "--amp")),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_flags(tmp_path, flags, words):
    refused(run_script(SCRIPT, "--out", tmp_path / "out", *flags, cwd=tmp_path), *words)
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_a_wrong_flag_is_reported_once_under_torchrun(tmp_path):
    done = torchrun(2, SCRIPT, "--epochs", 0, "--out", tmp_path)
    assert done.returncode != 0 and done.stdout.count("from 1 up") == 1


def test_spawn_inside_torchrun(tmp_path):
    done = torchrun(2, SCRIPT, "--spawn", 2, "--out", tmp_path)
    assert done.returncode != 0 and done.stdout.count("use one of the two") == 1


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not a zip at all"])
def test_a_malformed_npz(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    refused(
        run_script(SCRIPT, "--spawn", 2, "--data", tmp_path / "bad.npz", "--out", tmp_path),
        "bad.npz",
        "readable",
    )


def test_an_npz_without_labels(tmp_path, npz):
    arrays = dict(np.load(npz()))
    del arrays["y_test"]
    np.savez(tmp_path / "bad.npz", **arrays)
    refused(
        run_script(SCRIPT, "--data", tmp_path / "bad.npz", "--out", tmp_path),
        "no array y_test",
    )


def test_an_unwritable_out(tmp_path):
    (tmp_path / "file").write_text("in the way")
    refused(
        run_script(SCRIPT, "--spawn", 2, "--out", tmp_path / "file" / "out"),
        "cannot write",
        "--out",
    )


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can hide a folder from itself by mounting it read-only",
)
def test_out_on_a_read_only_place():
    refused(run_script(SCRIPT, "--out", "/proc/sys/out"), "cannot write", "--out")


@pytest.fixture
def saved(tmp_path, npz):
    done = run_script(SCRIPT, "--data", npz(), *TINY, "--out", tmp_path / "first")
    assert done.returncode == 0, done.stdout
    return tmp_path / "first" / "last.pt"


def test_a_truncated_checkpoint(tmp_path, npz, saved):
    (tmp_path / "cut.pt").write_bytes(saved.read_bytes()[:-2000])
    flags = ("--data", npz(), *TINY, "--out", tmp_path / "first")
    refused(
        run_script(SCRIPT, "--spawn", 2, *flags, "--resume", tmp_path / "cut.pt"),
        "truncated",
    )
    assert torch.load(saved, weights_only=True)["format"] == 1, "the good file is unchanged"


def test_a_folder_for_a_checkpoint(tmp_path, npz, saved):
    flags = ("--data", npz(), *TINY, "--out", tmp_path / "second", "--resume", saved.parent)
    refused(run_script(SCRIPT, *flags), "is a folder", str(saved))


def test_a_checkpoint_of_another_model(tmp_path, npz, saved):
    # The digits have 10 classes, the small data set has 3.
    flags = ("--batch-size", 8, "--out", tmp_path / "second")
    refused(
        run_script(SCRIPT, "--spawn", 2, *flags, "--resume", saved),
        "another model",
        "fc2.weight",
        "(3, 64)",
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [(("--seed", 7), ("--seed 0", "has 7")), (("--lr", 0.1), ("--lr 0.05",))],
)
def test_a_checkpoint_of_other_settings(tmp_path, npz, saved, flag, words):
    flags = ("--data", npz(), *TINY, *flag, "--out", tmp_path / "second")
    refused(run_script(SCRIPT, *flags, "--resume", saved), *words)


def test_a_file_that_is_not_a_checkpoint_of_this_course(tmp_path, npz):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    flags = ("--data", npz(), *TINY, "--out", tmp_path)
    refused(
        run_script(SCRIPT, *flags, "--resume", tmp_path / "other.pt"),
        "not a checkpoint of this course",
    )


def test_a_port_in_use_that_was_given(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = run_script(SCRIPT, "--spawn", 2, "--out", tmp_path, MASTER_PORT=port)
        refused(done, f"cannot bind port {port}", "in use")
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        done = run_script(SCRIPT, MASTER_PORT=port, **place)
        refused(done, "rank 0", f"cannot bind port {port}", "in use")


INTERACTIVE = {
    "SLURM_JOB_ID": 7,
    "SLURM_NTASKS": 4,
    "SLURM_PROCID": 0,
    "SLURM_LOCALID": 0,
    "SLURM_JOB_NAME": "bash",
}


def test_slurm_variables_of_an_interactive_shell(tmp_path, npz):
    flags = ("--data", npz(), *TINY, "--out", tmp_path)
    refused(run_script(SCRIPT, *flags, **INTERACTIVE), "4 tasks", "srun python", "--spawn 1")
    assert run_script(SCRIPT, *flags, "--spawn", 1, **INTERACTIVE).returncode == 0, (
        "the advice works"
    )
    assert run_script(SCRIPT, *flags, **INTERACTIVE | {"SLURM_NTASKS": 1}).returncode == 0


def test_a_world_of_size_0(tmp_path):
    refused(
        run_script(SCRIPT, "--out", tmp_path, RANK=0, LOCAL_RANK=0, WORLD_SIZE=0),
        "WORLD_SIZE is 0",
    )


def test_more_devices_than_there_are(tmp_path):
    """On a machine of which torch says that it has 2 GPUs."""
    program = (
        "import torch, runpy, sys\n"
        "torch.cuda.device_count = lambda: 2\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    done = run(sys.executable, "-c", program, SCRIPT, "--out", tmp_path, **place)
    refused(done, "3 ranks on this node but 2 GPUs", "--nproc-per-node=2")


def test_under_torchrun_too_a_mistake_is_one_sentence_and_no_traceback(tmp_path):
    done = torchrun(2, SCRIPT, "--data", "nowhere.npz", "--out", tmp_path)
    assert (
        done.returncode != 0
        and done.stdout.count("error: there is no data file nowhere.npz") == 1
    )
    assert "UserError" not in done.stdout


def test_a_checkpoint_of_other_data(tmp_path, npz, saved):
    flags = ("--data", npz(36), *TINY, "--out", tmp_path / "second")
    refused(run_script(SCRIPT, *flags, "--resume", saved), "--data (its checksum)")


def test_a_checkpoint_of_a_model_with_a_frozen_layer(tmp_path, npz):
    flags = ("--data", npz(), *TINY, "--out", tmp_path)
    assert run_script(INSTRUMENTED, *flags, PLANT="frozen").returncode == 0
    refused(
        run_script(INSTRUMENTED, *flags, "--resume", PLANT="plain"),
        "another model",
        "[6]",
        "[8]",
    )


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, npz):
    flags = ("--data", npz(), "--batch-size", 8, "--save-every", 1, "--out", tmp_path)
    refused(run_script(SCRIPT, *flags, "--lr", "3e38"), "not finite", "lower --lr")
    last = torch.load(tmp_path / "last.pt", weights_only=True)["parts"]["model"]
    assert all(value.isfinite().all() for value in last.values()), (
        "the checkpoint holds the last finite weights"
    )


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
