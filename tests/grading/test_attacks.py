"""Attacks on grading, in one batch with honest submissions: see attacks/report.md."""

import os
from pathlib import Path

import jupytext
import known
import pytest
from attack import (
    FOLDER,
    MARK,
    Attack,
    fingerprint,
    graded,
    load,
    marked_files,
    no_process_escapes,
    target,
)
from known import notebook, reference

from multigpu.grading import reports
from multigpu.grading.results import Result
from multigpu.grading.solution import Solution, read
from multigpu.grading.solution import find as find_solution
from multigpu.grading.submissions import Submission
from multigpu.launch import sandbox

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
ALONE = pytest.mark.skipif(not ALL, reason="only `make test-attacks` runs all attacks")
REPORT = FOLDER / "report.md"
HEAD = """# Attacks on grading

Written by `make test-attacks`. Each attack is a submission for the exercise of
[solution.py](solution.py), which has 10 points; all are graded in one batch with honest
submissions. An attack deserves what its answers deserve without the attack. The honest scores
were as in a batch without attacks; no process, no connection and no file were left. The last
rows are attacks on question 4 of lesson 15, which has 5 points, in a batch of their own.

| attack | what it tried | deserved | got | how it was stopped | what the checks said |
|---|---|---:|---:|---|---|
"""
MAX_SAID = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sandbox.probe().works, reason=sandbox.probe().problem),
]


@pytest.fixture(scope="module")
def solution() -> Solution:
    return read(FOLDER / "solution.ipynb", "attacks")


@pytest.fixture(scope="module")
def rows() -> list[str]:
    """The report's lines, which the tests add in turn."""
    return []


def honest(solution: Solution) -> dict[str, tuple[bytes, float]]:
    """Submissions by name, and their scores."""
    right = reference(solution)
    other = "# answer: total\ndef total(n):\n    s = 0\n    for x in n: s += x\n    return s\n"
    wrong = "# answer: total\ndef total(numbers):\n    return 6.0\n"
    return {
        "reference": (notebook(solution, right), 10),
        "another right one": (notebook(solution, right | {"total": other}), 10),
        "a hidden check wrong": (notebook(solution, right | {"total": wrong}), 7),
        "one of three": (notebook(solution, {"guess_bytes": right["guess_bytes"]}), 2),
        "blank": (notebook(solution, {}), 0),
    }


def mixed(attacks: dict[str, bytes], others: dict[str, bytes]) -> list[Submission]:
    """All of them, the others at equal distances among the attacks."""
    names = list(attacks)
    step = max(1, len(names) // len(others))
    for place, name in enumerate(others):
        names.insert(place * (step + 1), name)
    data = attacks | others
    return [Submission(name, f"{name}.ipynb", data[name]) for name in names]


def statuses(result: Result) -> list[tuple]:
    parts = [part for question in result.questions for part in question.parts]
    return [(part.title, part.status, part.lines) for part in parts]


def test_the_notebook_matches_its_script(solution) -> None:
    sources = [cell.source for cell in jupytext.read(FOLDER / "solution.py").cells]

    assert [cell.source for cell in solution.notebook.cells] == sources


@pytest.mark.timeout(1800)
def test_no_attack_gains_disturbs_or_stays(solution, rows, tmp_path, monkeypatch) -> None:
    attacks = [each for each in load() if ALL or each.name in FIVE]
    assert len(attacks) >= len(FIVE)
    good = honest(solution)
    files = {name: data for name, (data, _) in good.items()}
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = fingerprint(CHECKOUT)
    left: list[str] = []
    with no_process_escapes(left), target(tmp_path, solution) as aim:
        batch = mixed({each.name: each.file(solution, aim.texts) for each in attacks}, files)
        results = graded(solution, batch, tmp_path / "out")

    rows += [row(each, results[each.name]) for each in attacks]
    surprises = {
        each.name: (results[each.name].earned, each.deserved, said(results[each.name]))
        for each in attacks
        if results[each.name].earned != each.deserved or results[each.name].blocked
    }
    assert surprises == {}, "got, deserved"
    scores = {name: results[name].earned for name in good}
    assert scores == {name: deserved for name, (_, deserved) in good.items()}
    other = tmp_path / "alone"
    other.mkdir()
    (other / "secret.txt").write_bytes((tmp_path / "out" / "secret.txt").read_bytes())
    alone = graded(solution, mixed({}, files), other)
    for name in good:
        assert statuses(results[name]) == statuses(alone[name]), name
    names = ("attacks", "Attacks", "Attacks", "key")
    reports.write(list(results.values()), [], tmp_path / "reports", *names)
    assert aim.reached == [], "connections from the sandbox"
    assert left == [], "processes that are left"
    assert marked_files(CHECKOUT) == [], "files that are left"
    assert list(temporary.iterdir()) == [], "temporary files that are left"
    assert fingerprint(CHECKOUT) == before, "the checkout has changed"


@ALONE
def test_no_plan_is_fast_by_other_means(rows, tmp_path) -> None:
    """The attacks answer lesson 15's question about speed alone."""
    lesson = find_solution("15")
    (slower,) = (each for each in known.read(lesson.lesson) if "node alone" in each.name)
    texts = {"MARK": MARK}
    batch = {
        each.name: notebook(lesson, {"plan": each.text("plan", texts)})
        for each in load("speed.py")
    }
    files = {"fast": reference(lesson)["plan"], slower.name: slower.source}
    files = {name: notebook(lesson, {"plan": text}) for name, text in files.items()}
    results = graded(lesson, mixed(batch, files), tmp_path / "out")

    for each in load("speed.py"):
        result = results[each.name]
        result.questions = result.questions[-1:]
        rows.append(row(each, result))
    assert {name: result.earned for name, result in results.items()} == {
        **dict.fromkeys(batch, 0.0),
        "fast": 5.0,
        slower.name: 1.0,
    }
    times = {name: result.questions[-1].seconds for name, result in results.items()}
    assert min(filter(None, times.values())) == times["fast"]
    assert marked_files(CHECKOUT) == []


@ALONE
def test_the_report_is_written(rows) -> None:
    assert len(rows) > 100
    REPORT.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def row(attack: Attack, result: Result) -> str:
    """The attack's line of the report."""
    score = f"{result.earned:g}"
    return line(
        attack.name, attack.tries, f"{attack.deserved:g}", score, attack.held_by, said(result)
    )


def line(*words: str) -> str:
    clean = [word.replace("|", "\\|").replace("<", "&lt;") for word in words]
    return f"| {' | '.join(clean)} |"


def said(result: Result) -> str:
    """The problem, or the first verdict that is wrong."""
    parts = [part for question in result.questions for part in question.parts]
    lines = [text for part in parts if part.status != "right" for text in part.lines]
    wrong = [text for text in lines if not text.startswith("right")]
    text = result.problem or next(iter(wrong), "")
    return text if len(text) <= MAX_SAID else f"{text[:MAX_SAID]}…"
