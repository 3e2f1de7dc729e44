"""What the tests of several lessons share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from small_data import write_digits


@pytest.fixture
def few_digits(tmp_path: Path) -> Callable[..., Path]:
    """few_digits(train, test) writes some handwritten digits for --data; returns the path."""

    def write(train: int = 35, test: int = 7) -> Path:
        return write_digits(tmp_path / "digits.npz", train, test)

    return write


@pytest.fixture
def experiments(request: pytest.FixtureRequest, monkeypatch) -> Iterator[ModuleType]:
    """experiments.py in the folder PAGE of the test's module: each lesson has its own."""
    monkeypatch.syspath_prepend(request.module.PAGE)
    monkeypatch.delitem(sys.modules, "experiments", raising=False)
    import experiments

    yield experiments
    del sys.modules["experiments"]
