"""Lesson 10's experiments: what they measure is what the page says of them."""

import importlib.util
import sys

import cloudpickle
import pytest
from commands import ROOT

from multigpu import launch

pytestmark = pytest.mark.slow

# Not as `experiments`, because lesson 11's file has this name, too.
spec = importlib.util.spec_from_file_location(
    "lesson10_experiments", ROOT / "lessons" / "10-strategies" / "experiments.py"
)
experiments = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = experiments
spec.loader.exec_module(experiments)
# The ranks cannot import a module of this name.
cloudpickle.register_pickle_by_value(experiments)


@pytest.fixture(scope="module")
def both_runs() -> tuple[dict, dict, dict]:
    return experiments.slow_rank(("ddp", "bagua:async"), pause=0.1)


@pytest.fixture
def runs(both_runs) -> dict:
    return both_runs[0]


def begin(step) -> float:
    return step[0][1]


def end(step) -> float:
    return step[-1][2]


def test_in_ddp_each_step_waits_for_the_slow_rank(runs):
    fast, slow = runs["ddp"]
    assert len(fast) == len(slow) == 24
    for own, other in zip(fast, slow, strict=True):
        assert other[0][0] == experiments.PAUSE
        assert end(own) > other[0][2], "the fast step ends after the slow rank's pause"


def test_in_async_the_fast_rank_has_ended_before_the_slow_ranks_last_step(runs):
    fast, slow = runs["bagua:async"]
    assert len(fast) == len(slow) == 24
    assert end(fast[-1]) < begin(slow[-1])
    assert experiments.step_seconds(fast) < 0.7 * experiments.step_seconds(slow)


def test_async_has_averaged_while_the_fast_rank_trained(both_runs):
    rounds = both_runs[2]
    assert rounds["bagua:async"][-1] >= 3
    assert set(rounds["ddp"]) == {0}


def test_with_one_peer_each_a_rank_still_waits_for_the_slow_one():
    """Rank 0 meets rank 3 in every second step; rank 3 has paused 11 times before the last."""
    name = "bagua:decentralized:shift_one"
    loops = launch.call(experiments.loop, 4, name, 12, 0.1)
    assert loops[0].seconds >= 11 * 0.1


def test_with_one_peer_each_pauses_in_turn_overlap():
    """In ddp the pauses add up. With a peer each, two ranks can pause at the same time."""
    seconds = {
        name: launch.call(experiments.loop, 4, name, 12, 0.3, in_turn=True)[0].seconds
        for name in ("ddp", "bagua:decentralized:shift_one")
    }
    assert seconds["ddp"] >= 12 * 0.3
    assert seconds["bagua:decentralized:shift_one"] < 0.8 * seconds["ddp"]


def test_the_loop_counts_the_bytes_of_a_step():
    """ddp's all-reduce among four ranks, 6 bytes per weight; 4 with a peer each."""
    weights = 38_282
    for name, each in (("ddp", 6), ("bagua:decentralized:shift_one", 4)):
        for loop in launch.call(experiments.loop, 4, name, 6, 0.0):
            assert loop.bytes_per_step == pytest.approx(each * weights, rel=0.02)


def test_the_picture_has_a_panel_for_each_and_both_ranks(runs):
    figure = experiments.slow_rank_picture(runs)
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert any("epoch's end" in text for text in texts)


def test_a_longer_warm_up_brings_qadam_nearer_to_adam():
    outcomes = experiments.qadam_in_one_process((10, 100), epochs=5)
    short, long = outcomes["QAdam, warm-up 10"], outcomes["QAdam, warm-up 100"]
    assert short.largest > 5 * long.largest > 0
    assert outcomes["Adam"].largest == 0
    assert short.variance < 0.3, "the frozen variance of the farthest weights is small"


def test_the_ranks_can_pause_in_turn(both_runs):
    runs = both_runs[1]
    for run in runs.values():
        for rank, steps in enumerate(run):
            paused = [step[0][0] == experiments.PAUSE for step in steps]
            assert paused == [number % 2 == rank for number in range(12)]

    assert experiments.epoch_seconds(runs["ddp"]) > 12 * 0.1, "the pauses of both ranks add up"
