"""Steps of which rounding can explain too much are no proof."""

from pathlib import Path

import numpy as np
import pytest

from multigpu.prove import plan, proof
from multigpu.prove.compare import KINDS, Comparison, Distances, StepDistances
from multigpu.prove.processes import Run
from multigpu.prove.record import Head, RankRecord


def compared(limits: list[float]) -> Comparison:
    """A comparison of one parameter with these relative limits, one for each step."""
    one, zero = np.ones(1), np.zeros(1)
    head = Head(0, "SGD", 0, 1, [], [], None, True, [], [], 0.0, True, 0)
    record = RankRecord(0, {0: head}, [])
    steps = []
    for number, limit in enumerate(limits):
        distances = Distances(one, zero, zero, zero, zero, np.array([limit]))
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
def session(tmp_path: Path) -> proof._Session:
    planned = plan.Plan(["a"], ["b"], 2, None, real=False)
    return proof._Session(planned, tmp_path, None, 60, lambda text: None)


def test_what_comes_after_a_wide_limit_is_left_out(session, tmp_path):
    ended = Run("parallel", [], tmp_path, tmp_path, code=0)
    found = session.concluded(compared([0.01, 0.2, 0.7, 0.1]), None, ended)
    assert found.verdict == "holds" and " in 2 steps: " in found.line
    assert found.notes[0].startswith("from step 3 on rounding alone")
    with pytest.raises(proof._Unknown, match="the first step by half"):
        session.concluded(compared([0.7, 0.1]), None, ended)
