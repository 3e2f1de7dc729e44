"""make test-peer counts: on a stand-in for the peer's tests."""

import json
import os
import sys

import pytest
from commands import ROOT, run

on_request = pytest.mark.skipif("ALL_PEER" not in os.environ, reason="make test-peer runs it")
RUN = ROOT / "tests" / "peer" / "run.py"

STAND_IN = """
import pytest

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def test_passes(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=True, logger=False)
    trainer.fit(BoringModel())
    assert type(trainer).__module__.startswith("multigpu") and trainer.global_step == 1


def test_refuses_in_other_words():
    with pytest.raises(ValueError, match="words of Lightning's"):
        Trainer(max_epochs="x")


def test_is_private():
    assert Trainer(logger=False)._private == 1


def test_differs():
    assert Trainer(logger=False).max_epochs == "another"


@pytest.mark.skip
def test_skips(): ...
"""


def count(folder, content, workers):
    """Run run.py on a checkout whose only tests are `content`: (the process, its report)."""
    tests = folder / "tests" / "tests_pytorch"
    tests.mkdir(parents=True)
    (tests / "conftest.py").write_text("")
    (tests / "test_one.py").write_text(content)
    report = folder / "report.json"
    command = [sys.executable, RUN, folder, "test_one.py", "--report", report]
    return run(*map(str, command), "--workers", workers, cwd=folder), report


@on_request
def test_each_outcome_is_counted_once(tmp_path):
    done, found = count(tmp_path, STAND_IN, "0")
    assert done.returncode == 0, done.stdout
    report = json.loads(found.read_text())
    # The private and the differing test fail with Lightning itself, too.
    counts = {name: number for name, number in report["counts"].items() if number}
    assert counts == {"passed": 1, "wording": 1, "environment": 2, "skipped": 1}
    assert report["passed_of_public"] == 1.0


@on_request
def test_a_checkout_of_another_version_is_refused(tmp_path):
    """Its tests import names that the installed Lightning lacks."""
    done, report = count(tmp_path, "from lightning.pytorch import NotYet", "1")
    assert done.returncode == 1 and not report.exists()
    assert "test_one.py cannot be imported" in done.stdout.splitlines()[-1]
