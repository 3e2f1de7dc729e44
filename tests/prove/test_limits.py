"""The limit is what rounding does, and steps of which it can explain too much are no proof."""

from pathlib import Path

import numpy as np
import pytest

from multigpu.prove import plan
from multigpu.prove.causes import Cause, find
from multigpu.prove.compare import KINDS, Comparison, Distances, StepDistances, compare
from multigpu.prove.failures import Unknown
from multigpu.prove.processes import Run
from multigpu.prove.record import Head, Part, RankRecord, Step
from multigpu.prove.session import SLOW, Session

ROUNDING = 1e-4


def trained(
    kind: str, gradient: float, after: float, eps: float = 2.0**-23
) -> list[RankRecord]:
    """One rank and step: a weight of 1, its gradient, and the weight after the step."""
    weights, gradients, later = np.zeros((3, 1, 64))
    weights[0, 0], gradients[0, 0], later[0, 0] = 1.0, gradient, after
    part = Part("weight", (1,), None, 1, eps)
    head = Head(0, kind, 0, 1, [part], [], [], None, True, [], [], 0.0, True, 0)
    step = Step(0, 0, weights, gradients, np.ones(1, bool), [{}], *2 * (np.zeros((0, 64)),))
    step.after = later
    return [RankRecord(0, {0: head}, [step])]


def failing(kind: str, gradient: float = 1.0, after: float = 0.5) -> list[str]:
    """What fails in a step, where rounding changes a gradient of 1 by ROUNDING."""
    reference, band = trained(kind, 1.0, 0.5), trained(kind, 1.0 + ROUNDING, 0.5)
    step = compare(reference, trained(kind, gradient, after), [band]).steps[0]
    return [name for name, distances in step.kinds.items() if distances.fails().any()]


def test_the_limit_is_ten_times_what_rounding_does():
    assert failing("SGD", gradient=1 + 9 * ROUNDING) == []
    assert failing("SGD", gradient=1 + 11 * ROUNDING) == ["gradients"]


def test_a_float64_run_is_held_to_float64():
    for eps, fails in ((2.0**-23, False), (2.0**-52, True)):
        reference = trained("SGD", 1.0, 0.5, eps)
        parallel = trained("SGD", 1.0 + 1e-9, 0.5, eps)
        gradients = compare(reference, parallel, [reference]).steps[0].kinds["gradients"]
        assert gradients.fails().any() == fails


def test_rounding_may_turn_some_of_adams_steps_around():
    """2 sqrt(10 ROUNDING), 6% of the step of 0.5."""
    assert failing("Adam", after=0.53) == []
    assert failing("Adam", after=0.54) == ["after"]
    assert failing("SGD", after=0.53) == ["after"]


def test_rounding_may_explain_another_loss():
    """The mean of the ranks' losses is 0.01 from the reference's."""
    losses = {"reference": [2.0], "rank 0": [2.0], "rank 1": [2.02]}
    rows = {"reference": [1.0, 2.0], "rank 0": [1.0], "rank 1": [2.0]}
    runs = {}
    for name in losses:
        (runs[name],) = trained("SGD", 1.0, 0.5)
        runs[name].steps[0].gradients[0, 1] = name != "reference"
        runs[name].steps[0].losses = losses[name]
        runs[name].steps[0].rows = [np.array(rows[name])]
        runs[name].steps[0].outputs = [np.zeros(0)]
    runs["rank 1"].rank = runs["rank 1"].heads[0].rank = 1
    for moved, kind in ((0.0005, "own_mean"), (0.002, "gradients")):
        band = trained("SGD", 1.0, 0.5)
        band[0].steps[0].losses = [2.0 + moved]
        band[0].steps[0].rows = runs["reference"].steps[0].rows
        parallel = [runs["rank 0"], runs["rank 1"]]
        cause = find(compare([runs["reference"]], parallel, [band]))
        assert cause.kind == kind, cause


def test_a_model_that_begins_with_nan_was_not_initialized():
    records = trained("SGD", float("nan"), 0.5)
    cause = find(compare(records, records, []))
    assert cause.kind == "not_finite" and "to_empty()" in cause.remedy


def compared(limits: list[float], off: list[float] | None = None) -> Comparison:
    """A comparison of one parameter: each step's relative limit, and its difference (0)."""
    one, zero = np.ones(1), np.zeros(1)
    head = Head(0, "SGD", 0, 1, [], [], [], None, True, [], [], 0.0, True, 0)
    record = RankRecord(0, {0: head}, [])
    steps = []
    for number, limit in enumerate(limits):
        far = np.array([off[number] if off else 0.0])
        distances = Distances(one, far, zero, zero, np.array([limit]))
        steps.append(
            StepDistances(
                (0, number),
                ["weight"],
                dict.fromkeys(KINDS, distances),
                one,
                one,
                [],
                [],
                [0],
                [],
            )
        )
    return Comparison([record], [record, record], [], steps)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    planned = plan.Plan(["a"], ["b"], 2, None, real=False)
    return Session(planned, tmp_path, None, 60, lambda text: None)


def test_what_comes_after_a_wide_limit_is_left_out(session, tmp_path):
    ended = Run("parallel", [], tmp_path, tmp_path, code=0)
    found = session.concluded(compared([0.01, 0.2, 0.7, 0.1]), None, ended)
    assert found.verdict == "holds" and " in the first 2 of 4 steps: " in found.line
    assert found.notes[0].startswith("from step 3 on rounding alone")
    with pytest.raises(Unknown, match="the first step by half"):
        session.concluded(compared([0.7, 0.1]), None, ended)


@pytest.mark.parametrize("cause", [None, Cause("rows_repeated", "a", "b", 3)])
def test_steps_with_a_wide_limit_are_compared_again_with_small_rates(
    session, monkeypatch, tmp_path, cause
):
    """The verdict on step 3 is that of the second runs."""
    again = compared([0.01, 0.01, 0.01])
    run = Run("again", [], tmp_path, tmp_path, code=0)
    rates = []
    monkeypatch.setattr(session, "references", lambda steps: (run, []))
    monkeypatch.setattr(
        session, "parallel_run", lambda steps: rates.append(session.rate) or run
    )
    monkeypatch.setattr(session, "compare", lambda *runs: again)
    monkeypatch.setattr("multigpu.prove.session.find", lambda comparison: cause)
    first = compared([0.01, 0.019, 0.1])
    found, why = session.with_small_steps(first, 3)
    assert rates == [SLOW] and why is cause
    assert [step.kinds["after"].limit[0] for step in found.steps] == [0.01, 0.019, 0.01]
    assert session.notes[0].startswith("rounding alone changes much from step 3 on")


def test_a_limit_that_is_wide_from_the_first_step_on_needs_no_small_rates(session):
    """As in 16 bit: smaller steps would change nothing."""
    wide = compared([0.1, 0.2, 0.25])
    assert session.with_small_steps(wide, 3) == (wide, None)
    assert not session.notes
