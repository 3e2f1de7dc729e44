"""All tests and notebooks use this environment's `torchrun` and `multigpu`, active or not.

They run on CPU processes, also on a machine with GPUs: they start two to four ranks, and a
machine may have only one GPU.
"""

import multiprocessing.spawn
import os
import signal
import sys
from pathlib import Path

import pytest
import warm
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
# A script starts `pytest &` with SIGINT ignored, and the programs of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["nbval_report"]


def pytest_configure(config: pytest.Config) -> None:
    """All workers share one warm process, which imports torch, and TensorFlow, once."""
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        warm.python()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The ranks of this process, and the kernels of notebooks, start as warm.py describes.

    Tests that start `python` or `sys.executable` start real ones: the launchers, what ends a
    run, `cell` in tests/trainer/test_spawn.py.
    """
    multiprocessing.spawn.set_executable(warm.python())
    os.environ["JUPYTER_PATH"] = str(warm.python().parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders that take longest come first, so that the workers end at the same time."""
    first = ("cluster", "notebooks", "lessons")
    places = {folder: place for place, folder in enumerate(first)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(first)))


class OneFilePerWorker(LoadScopeScheduling):
    """A worker runs a whole file: a notebook's cells need each other, tests share fixtures.

    One worker runs all of tests/cluster, because a machine has one classroom cluster.
    (`--dist=loadgroup` has no effect with pytest 9.2 and pytest-xdist 3.8.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/cluster" if file.startswith("tests/cluster/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneFilePerWorker:
    config.option.loadscopereorder = False  # keep the order of pytest_collection_modifyitems
    return OneFilePerWorker(config, log)
