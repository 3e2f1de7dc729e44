"""A rank that ends, raises or gets a SIGTERM ends or stops the whole run."""

import json
import os
import signal

import pytest
import small_net
import warm
from commands import ROOT, run
from torch.utils.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- a rank ends or raises ------------------------------------------------------------------


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


# ---- SIGTERM --------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_after_the_same_step_and_the_run_goes_on_from_there(
    tmp_path,
):
    code, reported = script("term", tmp_path)
    assert code == 143 and "SIGTERM after step 5" in reported and "ckpt_path=" in reported
    assert script("resume", tmp_path)[0] == 0 and script("whole", tmp_path)[0] == 0
    for rank in (0, 1):
        first, second, whole = (
            json.loads((tmp_path / f"{m}{rank}.json").read_text())
            for m in ("term", "resume", "whole")
        )
        assert first[1] == 5 and second[1] == whole[1] == 9
        assert first[0] + second[0] == whole[0], "to the bit, on each rank"


def test_a_sigterm_outside_of_training_is_not_swallowed_and_none_is_kept():
    before = signal.getsignal(signal.SIGTERM)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    try:
        trainer = small_net.cpu()
        model = small_net.make_net()
        model.on_test_start = lambda: os.kill(os.getpid(), signal.SIGTERM)
        trainer.test(model, DataLoader(small_net.rows(4), 2), verbose=False)
        assert asked == [1]
        trainer.fit(model, DataLoader(small_net.rows(4), 2))
        assert trainer.global_step == 2
    finally:
        signal.signal(signal.SIGTERM, before)
