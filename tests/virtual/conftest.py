"""Virtual GPUs that look like CUDA; the fixture `two` has those that do not."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import nccl_programs
import pytest


@pytest.fixture(scope="module")
def looks_like_cuda() -> Iterator[list]:
    """Two virtual GPUs that look like CUDA, for the tests of a file: cuda:0 and cuda:1."""
    from multigpu.virtual import face

    yield face.put_on()
    face.take_off()


@pytest.fixture
def fresh_cuda() -> Iterator[list]:
    """Two virtual GPUs that look like CUDA, for one test."""
    from multigpu.virtual import face

    yield face.put_on()
    face.take_off()


@pytest.fixture
def cuda(looks_like_cuda: list) -> Iterator[list]:
    """The devices of looks_like_cuda; cuda:0 is the current one before and after the test."""
    import torch

    yield looks_like_cuda
    torch.cuda.set_device(0)


@pytest.fixture
def gpus() -> Iterator[list]:
    """Two devices with figures that allow to compute times by hand: see compare_devices.py."""
    from compare_devices import CABLE, ROUND

    from multigpu.virtual import control

    with control.running(count=2, gpu=ROUND, link=CABLE) as devices:
        yield devices


@pytest.fixture
def processes(tmp_path: Path) -> Callable[..., list]:
    """processes(program, size=2) runs a program's ranks; see nccl_programs.run."""
    return partial(nccl_programs.run, tmp_path)


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., list]:
    """results(program, size=2): what each of a program's ranks prints last, as JSON."""
    return partial(nccl_programs.results, tmp_path)
