"""make test-peer counts: on a stand-in for the peer's tests."""

import json
import sys

import pytest
from commands import ROOT, run

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


@pytest.mark.slow
def test_each_outcome_is_counted_once(tmp_path):
    folder = tmp_path / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text("")
    (folder / "test_one.py").write_text(STAND_IN)
    found = tmp_path / "report.json"
    command = [sys.executable, RUN, tmp_path, "test_one.py", "--report", found]
    done = run(*map(str, command), "--workers", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    report = json.loads(found.read_text())
    # The private and the differing test fail with Lightning itself, too.
    counts = {name: number for name, number in report["counts"].items() if number}
    assert counts == {"passed": 1, "wording": 1, "environment": 2, "skipped": 1}
    assert report["passed_of_public"] == 1.0


def test_a_folder_without_the_peers_tests_is_named(tmp_path):
    for folder in (str(tmp_path), ""):
        done = run(sys.executable, str(RUN), folder, cwd=tmp_path)
        assert done.returncode == 1
        assert "FROM" in done.stdout and len(done.stdout.strip().splitlines()) == 1
