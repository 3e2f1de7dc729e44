"""A rank that ends, raises or wants to stop ends or stops the whole run."""

import json

import pytest
import warm
from commands import ROOT, run

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = ROOT / "tests" / "support" / "trainer_script.py"


def script(mode, folder, *starter, timeout=60):
    done = run(
        *(starter or (warm.python(),)), SCRIPT, mode, folder, PYTHONPATH=ROOT, timeout=timeout
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_rank_that_dies_without_a_word_ends_the_run(tmp_path):
    code, reported = script("exit", tmp_path)
    assert code == 7 and "error: rank 1" in reported and "exit code 7" in reported
    assert "Traceback" not in reported, "not that of gloo's lost connection"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_the_one_that_is_told(tmp_path, rank):
    code, reported = script(f"raise {rank}", tmp_path)
    assert code == 1 and f"ZeroDivisionError: planted in rank {rank}" in reported
    assert reported.count("Traceback") == 1 and "peer" not in reported


@pytest.mark.slow
def test_horovodrun_ends_the_run_too(tmp_path):
    code, reported = script(
        "raise 1", tmp_path, "multigpu", "horovodrun", "-np", 2, warm.python()
    )
    assert code == 1 and "ZeroDivisionError: planted in rank 1" in reported
    assert (
        reported.count("Traceback") == 1
        and "error: rank 1" in reported
        and "exit code 1" in reported
    )


@pytest.mark.slow
def test_one_ranks_wish_stops_all_after_the_same_step_and_the_run_goes_on_from_there(tmp_path):
    assert script("stop", tmp_path)[0] == 0
    assert script("resume", tmp_path)[0] == 0 and script("whole", tmp_path)[0] == 0
    for rank in (0, 1):
        first, second, whole = (
            json.loads((tmp_path / f"{m}{rank}.json").read_text())
            for m in ("stop", "resume", "whole")
        )
        assert first[1] == 5 and second[1] == whole[1] == 9
        assert first[0] + second[0] == whole[0], "to the bit, on each rank"
