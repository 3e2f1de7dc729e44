"""What the tests of several lessons share."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def experiments(request: pytest.FixtureRequest, monkeypatch) -> Iterator[ModuleType]:
    """experiments.py in the folder PAGE of the test's module: each lesson has its own."""
    monkeypatch.syspath_prepend(request.module.PAGE)
    monkeypatch.delitem(sys.modules, "experiments", raising=False)
    import experiments

    yield experiments
    del sys.modules["experiments"]
