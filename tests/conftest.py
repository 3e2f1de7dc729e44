"""Fixtures of all tests."""

import os
import sys
from pathlib import Path

import pytest
from small_data import write_npz

# A run that stands still writes to the user's cache by default.
os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown() -> None:
    """Undo what a test can leave in its process.

    Remove the seed that seed_everything passes on to processes that are started later, and the
    variable that a deterministic Trainer sets. Give the switches of TF32 their defaults: the
    simulated time of float32 depends on them. Destroy the process group, which the Trainer
    keeps: the next test would communicate through it.
    """
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG"):
        os.environ.pop(name, None)
    if torch := sys.modules.get("torch"):
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


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
