"""`make test` runs again what failed, alone: a real failure stays one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "failed.py"
TESTS = "def test_good(): pass\ndef test_bad(): assert False\n"


def again(folder: Path, failed: list[str]) -> subprocess.CompletedProcess:
    cache = folder / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    (folder / "test_two.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, str(PROGRAM)], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize(("name", "code"), [("test_good", 0), ("test_bad", 1)])
def test_what_fails_alone_fails(tmp_path, name, code):
    run = again(tmp_path, [f"test_two.py::{name}"])
    assert run.returncode == code, run.stdout
    assert f"running again, alone:\n  test_two.py::{name}\n" in run.stdout
    assert "1 failed" in run.stdout if code else "1 passed" in run.stdout


def test_many_failures_are_not_run_again(tmp_path):
    run = again(tmp_path, [f"test_two.py::test_good[{k}]" for k in range(11)])
    assert run.returncode == 1
    assert run.stdout == "11 tests failed: they are not run again\n"
