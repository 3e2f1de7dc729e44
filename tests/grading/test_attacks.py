"""Attacks on grading, in one batch with honest submissions. tests/grading/attacks/report.md."""

import os
from pathlib import Path

import pytest
from attack import FOLDER, Attack, fingerprint, load, marked_files, no_process_escapes, target
from known import graded, notebook, reference

from multigpu import sandbox
from multigpu.grading.results import Result
from multigpu.grading.solution import Solution, read

CHECKOUT = Path(__file__).parents[2]
# `make test` runs these, `make test-attacks` all.
FIVE = (
    "a verdict forged by an error's lines",
    "a fork bomb",
    "a loop that ignores interrupts",
    "solutions read",
    "checks changed",
)
ALL = "ALL_ATTACKS" in os.environ
REPORT = FOLDER / "report.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sandbox.probe().works, reason=sandbox.probe().problem),
]


def honest(solution: Solution) -> dict[str, tuple[bytes, float]]:
    """Submissions by name, and their scores."""
    right = reference(solution)
    other = {
        "total": "# answer: total\ndef total(n):\n    s = 0\n    for x in n: s += x\n    return s"
    }
    wrong = {"total": "# answer: total\ndef total(numbers):\n    return 6.0\n"}
    return {
        "reference": (notebook(solution, right), 10),
        "another right one": (notebook(solution, right | other), 10),
        "one hidden check wrong": (notebook(solution, right | wrong), 7),
        "one of three": (notebook(solution, {"guess_bytes": right["guess_bytes"]}), 2),
        "blank": (notebook(solution, {}), 0),
    }


def mixed(attacks: dict[str, bytes], others: dict[str, bytes]) -> dict[str, bytes]:
    """All of them, the others at equal distances among the attacks."""
    names = list(attacks)
    step = max(1, len(names) // len(others))
    for place, name in enumerate(others):
        names.insert(place * (step + 1), name)
    return {name: (attacks | others)[name] for name in names}


def statuses(result: Result) -> list[tuple]:
    return [
        (part.title, part.status, part.lines) for q in result.questions for part in q.parts
    ]


@pytest.mark.timeout(900)
def test_no_attack_gains_disturbs_or_stays(tmp_path, monkeypatch) -> None:
    solution = read(FOLDER / "solution.ipynb", "attacks")
    attacks = [each for each in load() if ALL or each.name in FIVE]
    assert len(attacks) >= len(FIVE)
    good = honest(solution)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = fingerprint(CHECKOUT)
    left: list[str] = []
    with no_process_escapes(left), target(tmp_path, solution) as aim:
        files = {each.name: each.file(solution, aim.texts) for each in attacks}
        files = mixed(files, {name: data for name, (data, _) in good.items()})
        results = graded(solution, files, tmp_path / "out")
        reached = aim.reached

    write_report(attacks, results)
    surprises = {
        each.name: (results[each.name].earned, each.deserved)
        for each in attacks
        if results[each.name].earned != each.deserved or results[each.name].blocked
    }
    assert surprises == {}, "got, deserved"
    assert {name: results[name].earned for name in good} == {
        n: s for n, (_, s) in good.items()
    }
    alone = graded(
        solution, {name: data for name, (data, _) in good.items()}, tmp_path / "alone"
    )
    for name in good:
        assert statuses(results[name]) == statuses(alone[name]), name
    assert reached == [], "connections from the sandbox"
    assert left == [], "processes that are left"
    assert marked_files(CHECKOUT) == [], "files that are left"
    assert list(temporary.iterdir()) == [], "temporary files that are left"
    assert fingerprint(CHECKOUT) == before, "the checkout has changed"


def write_report(attacks: list[Attack], results: dict[str, Result]) -> None:
    """The table of all attacks, if all have run."""
    if not ALL:
        return
    lines = []
    for each in attacks:
        result = results[each.name]
        print(each.name, result.earned, each.deserved, first_wrong(result))
        words = (
            each.name,
            each.tries,
            f"{each.deserved:g}",
            f"{result.earned:g}",
            each.held_by,
            first_wrong(result),
        )
        lines.append("| " + " | ".join(word.replace("|", "\\|") for word in words) + " |")
    REPORT.write_text("\n".join(lines) + "\n")


def first_wrong(result: Result) -> str:
    """What the checks said."""
    if result.problem:
        return result.problem
    parts = [part for question in result.questions for part in question.parts]
    wrong = [line for part in parts if part.status != "right" for line in part.lines]
    return next((line for line in wrong if not line.startswith("right")), "")
