"""How a run ends that has started its own ranks: the rank that failed is reported."""

import os
import sys
import time

import pytest
from commands import ROOT, run

pytestmark = pytest.mark.slow


def ended(mode, folder):
    """The exit code, what was printed, and the seconds from rank 1's last word on."""
    done = run(
        sys.executable,
        ROOT / "tests" / "support" / "ranks_end_script.py",
        mode,
        folder,
        PYTHONPATH=ROOT,
    )
    return done.returncode, done.stdout, time.time() - (folder / "rank 1").stat().st_mtime


def test_a_rank_that_fails_when_rank_0_is_done_fails_the_run(tmp_path):
    code, reported, _ = ended("raise", tmp_path)
    assert code == 1 and "error: rank 1 ended with exit code 1" in reported
    assert (
        reported.count("ZeroDivisionError: planted in rank 1")
        == reported.count("Traceback")
        == 1
    )


def test_a_rank_that_is_later_than_rank_0_is_waited_for(tmp_path):
    code, reported, _ = ended("late", tmp_path)
    assert code == 0 and (tmp_path / "done").exists()
    assert reported.count("rank 0 is done, and waits for rank 1. Ctrl-C ends the run.") == 1


def test_a_sigterm_to_rank_0_that_waits_ends_all(tmp_path):
    code, _, seconds = ended("stopped", tmp_path)
    assert code == 143 and seconds < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "rank 1").read_text()), 0)


def test_a_rank_0_that_exits_early_does_not_wait_for_one_that_waits_for_it(tmp_path):
    code, reported, seconds = ended("exit", tmp_path)
    assert code == 1 and "by peer" in reported and seconds < 30


@pytest.mark.parametrize(("mode", "expected"), [("slow raise", 1), ("slow exit", 3)])
def test_a_rank_that_takes_long_to_die_is_the_one_that_is_told(tmp_path, mode, expected):
    code, reported, seconds = ended(mode, tmp_path)
    assert code == expected and f"error: rank 1 ended with exit code {expected}" in reported
    assert reported.count("Traceback") == ("raise" in mode) and "peer" not in reported
    assert seconds < 15
