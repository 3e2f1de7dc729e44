"""Fixtures of all tests."""

import os
import sys
from pathlib import Path

import pytest
from small_data import write_npz

# A run that stands still writes to the user's cache by default.
os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


def pytest_runtest_teardown() -> None:
    """Undo what a test can leave in its process.

    Remove the seed that seed_everything passes on to processes that are started later. Give
    the switches of TF32 their defaults: the simulated time of float32 depends on them.
    """
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    if torch := sys.modules.get("torch"):
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")


@pytest.fixture
def npz(tmp_path: Path):
    """npz(train, test) writes a data set of random images with 3 classes; returns the path."""

    def make(train: int = 35, test: int = 7) -> Path:
        return write_npz(tmp_path / "small.npz", train, test)

    return make


@pytest.fixture
def two():
    """Two virtual GPUs, stopped after the test."""
    from multigpu.virtual import control

    with control.running(count=2) as devices:
        yield devices


@pytest.fixture
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof's programs run in forks of the warm process."""
    import warm

    monkeypatch.setattr(sys, "executable", str(warm.python()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture(autouse=True)
def no_setting_of_cublas():
    """Remove the variable that a deterministic Trainer sets for its whole process."""
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.fixture
def no_process_group():
    """Destroy the default process group if there is one, so that the test can start its own.

    An earlier test can have started one: the Trainer keeps its group until the process ends.
    The test's own group is destroyed, too: a later test would communicate through it.
    """
    import torch.distributed as dist

    def destroy() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    destroy()
    yield
    destroy()


@pytest.fixture(scope="session")
def cluster():
    """The classroom cluster: the one that is up, else one for this session."""
    from cluster import Cluster

    from multigpu import classroom

    if reason := classroom.unavailable_reason():
        pytest.skip(reason)
    was_up = classroom.status()[0]
    if not was_up:
        classroom.up()
    yield Cluster()
    if not was_up:
        classroom.down()
