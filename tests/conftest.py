"""Fixtures of all tests."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

os.environ["OMP_NUM_THREADS"] = "1"
# Ranks of `launch.call` in a test are forked from a server that has imported torch once.
# tests/trainer/test_spawn.py and the lessons' own mp.spawn start real processes.
os.environ["MULTIGPU_START_METHOD"] = "forkserver"
multiprocessing.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.nn.parallel", "multigpu.trainer", "multigpu.vgpu"]
)


# Files that `make test-quick` leaves out: they start real processes, or take seconds per test.
SLOW = {
    *("test_tf_common.py", "test_endings.py", "test_doctor.py", "test_bad_input.py"),
    *("test_front_page.py", "test_notebooks.py", "test_routes.py", "test_distributed.py"),
    *("test_rules.py", "test_ranks_end.py", "test_same.py", "test_spawn.py", "test_data.py"),
    *(
        "test_horovod_package.py",
        "test_qadam.py",
        "test_decentralized.py",
        "test_on_virtual_gpus.py",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_teardown() -> None:
    """Remove the seed that seed_everything passes on to processes that are started later."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture
def npz(tmp_path: Path):
    """npz(train, test) writes a data set of random images with 3 classes; returns the path."""

    def make(train: int = 35, test: int = 7) -> Path:
        random = np.random.default_rng(0)
        arrays = {}
        for part, n in (("train", train), ("test", test)):
            arrays[f"x_{part}"] = random.integers(0, 256, (n, 8, 8), dtype=np.uint8)
            arrays[f"y_{part}"] = random.integers(0, 3, n)
        # all three classes
        arrays["y_train"][0] = 2
        path = tmp_path / "small.npz"
        np.savez(path, **arrays)
        return path

    return make


@pytest.fixture
def two():
    """Two virtual GPUs, stopped after the test."""
    from multigpu import vgpu

    with vgpu.running(count=2) as devices:
        yield devices


@pytest.fixture(scope="session")
def cluster():
    """The classroom cluster: the one that is up, else one for this session."""
    from cluster import Cluster

    from multigpu import classroom

    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail(
            "a machine has one classroom cluster: mark the test with pytest.mark.classroom"
        )
    if reason := classroom.unavailable_reason():
        pytest.skip(reason)
    was_up = classroom.status()[0]
    if not was_up:
        classroom.up()
    yield Cluster()
    if not was_up:
        classroom.down()
