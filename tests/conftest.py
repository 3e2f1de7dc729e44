"""What all tests share: an environment without a launcher's traces, and a way to run a command that cannot hang."""

import contextlib
import os
import random
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "PT_CNN_MultiGPU.py"
INSTRUMENTED = ROOT / "tests" / "instrumented.py"
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "HOROVOD_", "TORCHELASTIC_", "MASTER_")
TRACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST", "PLANT", "MULTIGPU_LAUNCHER")

os.environ["OMP_NUM_THREADS"] = "1"


def clean_environment(**more: object) -> dict[str, str]:
    """This environment without anything that a launcher left in it, and with `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in TRACES}
    return kept | {key: str(value) for key, value in more.items()}


def run(
    *command: object, cwd: Path | None = None, timeout: float = 240, **environment: object
) -> subprocess.CompletedProcess:
    """Run a command to its end; stdout and stderr come together in .stdout. A hang is a failure after `timeout` s."""
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, timeout=timeout, env=clean_environment(**environment), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def torchrun(ranks: int, script: Path, *flags: object, **keywords: object) -> subprocess.CompletedProcess:
    # --local-addr: where the machine's own name does not resolve, --standalone waits for ever
    local = ("--standalone", "--local-addr=127.0.0.1")
    return run("torchrun", *local, f"--nproc-per-node={ranks}", script, *flags, **keywords)


def free_ports(count: int) -> list[int]:
    """Below 32768: the kernel gives no such port to the listeners that ask for any, which are opened before these are bound."""
    found = []
    for port in random.SystemRandom().sample(range(25000, 32000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


# A fault for `planted`: the gradients are never averaged.
SILENT_DDP = """
class Silent(lesson.DDP):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.require_backward_grad_sync = False

lesson.DDP = Silent
"""


def planted(folder: Path, stem: str, fault: str) -> Path:
    """A script that is the lesson's after `fault` was run, which knows it as `lesson`.

    A spawned process imports the file again, and so has the fault, too.
    """
    path = folder / "planted.py"
    path.write_text(
        f"import os, sys, torch\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport {stem} as lesson\n"
        f"from multigpu import launch\n{fault}\n"
        "if __name__ == '__main__':\n    launch.start(lesson.main, lesson.parse())\n"
    )
    return path


def pytest_runtest_teardown() -> None:
    """seed_everything tells its seed to processes that are started later: not to those of the next test, or a notebook."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture
def npz(tmp_path: Path):
    """Make a small data set: npz(train, test) writes random images with 3 classes and gives the path."""

    def make(train: int = 35, test: int = 7) -> Path:
        random = np.random.default_rng(0)
        arrays = {}
        for part, n in (("train", train), ("test", test)):
            arrays[f"x_{part}"] = random.integers(0, 256, (n, 8, 8), dtype=np.uint8)
            arrays[f"y_{part}"] = random.integers(0, 3, n)
        arrays["y_train"][0] = 2  # all three classes are there
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
    """The classroom cluster: the one that is up already, else one for this session. Skips where Slurm is missing."""
    from cluster import Cluster

    from multigpu import classroom

    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("a machine has one classroom cluster: mark the test with pytest.mark.classroom")
    if why_not := classroom.obstacle():
        pytest.skip(why_not)
    was_up = classroom.status()[0]
    if not was_up:
        classroom.up()
    yield Cluster()
    if not was_up:
        classroom.down()
