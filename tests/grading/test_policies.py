"""The roster, Gradescope's file, and what the command says."""

import csv
import io
import json
import re
import shutil

import pytest
import small_exercise
from graded import question, result
from handed_in import notebook, write

from multigpu.cli import exercises
from multigpu.errors import UserError
from multigpu.grading import batch, grade, gradescope, roster
from multigpu.grading.marking import Outcome
from multigpu.grading.results import Account
from multigpu.grading.submissions import Submission
from multigpu.grading.transplant import take


def options(tmp_path, **more):
    """The command's options for a class of two; nothing is run."""
    solutions = tmp_path / "solutions"
    solutions.mkdir(exist_ok=True)
    small_exercise.solution(solutions)
    for name in ("anna", "ben"):
        write(tmp_path / "class" / f"{name}.ipynb")
    return batch.Options(
        "05", tmp_path / "class", tmp_path / "out", None, 1, solutions=solutions, **more
    )


@pytest.fixture
def not_run(monkeypatch):
    """Grading gives results at once; the list says how often it was asked for them."""
    calls = []

    def fake(solution, submissions, *others):
        calls.append(len(submissions))
        answers = [take(each.data, solution) for each in submissions]
        return [
            grade.result(solution, each, found, Outcome())
            for each, found in zip(submissions, answers, strict=True)
        ]

    monkeypatch.setattr(batch.grade, "grade", fake)
    return calls


def run(given):
    return batch.run(given, lambda done, of: None)


def test_a_folder_with_results_of_another_lesson_is_refused(tmp_path, not_run):
    given = options(tmp_path)
    run(given)
    run(given)
    (tmp_path / "out" / "lesson.txt").write_text("02-data-parallel\n")
    with pytest.raises(UserError, match=r"02-data-parallel.*another folder.*05-ddp-cluster"):
        run(given)
    assert len(not_run) == 2


ROSTERS = {
    "own": "student\nanna\nzoe\n",
    "semicolons": "\ufeffname;Student\nx;anna\n\nx;zoe\n",
    "Canvas": "Student,ID,05 (7)\n    Points Possible,,4\nanna,1,\nzoe,12,\n",
    "Moodle": "Identifier,Full name\nParticipant 1,anna\nParticipant 12,zoe\n",
}


@pytest.mark.parametrize("form", ROSTERS)
def test_the_roster_says_who_has_handed_in_nothing(tmp_path, not_run, form):
    path = tmp_path / "roster.csv"
    path.write_text(ROSTERS[form], encoding="utf-8")
    text = "\n".join(run(options(tmp_path, roster=path)))
    assert re.search(r"handed in nothing: 1\n +zoe", text)
    assert re.search(r"not on the roster: 1\n +ben", text)
    table = (tmp_path / "out" / "gradebook.csv").read_text(encoding="utf-8-sig")
    [zoe] = [row for row in csv.DictReader(io.StringIO(table)) if row["student"][:3] == "zoe"]
    assert (zoe["status"], zoe["total"]) == ("nothing handed in", "")


def test_the_roster_finds_a_platforms_number(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text(ROSTERS["Canvas"])
    here = Submission("zoe z (Canvas 12)", "x.ipynb", account=Account("Canvas", "12"))
    assert roster.compare(roster.read(path), [here]) == ["anna (1)"]
    assert not here.notes


def test_a_number_on_the_roster_goes_before_a_name(tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text("Student,ID\nJane,1\nJane,2\n,3\nJose\u0301,\n", encoding="utf-8")
    here = [
        Submission("Jane", "x.ipynb"),
        Submission("Jane (Canvas 1)", "x.ipynb", account=Account("Canvas", "1")),
        Submission("Jos\xe9", "x.ipynb"),
    ]
    assert roster.compare(roster.read(path), here) == ["(3)"]
    assert not any(one.notes for one in here)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("student\nanna\nben\nanna\n", "line 4: anna is in line 2, too"),
        ("login\nanna\n", "column student"),
        ("", "column student"),
        ("student\n\xff", "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_roster_that_cannot_be_used(tmp_path, not_run, text, named):
    path = tmp_path / "roster.csv"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=named):
        run(options(tmp_path, roster=path))
    assert not not_run


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["anna.ipynb"], ""),
        (["anna.ipynb", "05-ddp-cluster.ipynb"], "05-ddp-cluster.ipynb was graded"),
        (["notes.txt"], "no notebook was handed in"),
        ([], "no notebook was handed in"),
    ],
)
def test_gradescopes_folder_is_one_students(tmp_path, not_run, files, said):
    given = options(tmp_path, gradescope=tmp_path / "results.json")
    shutil.rmtree(given.handed_in)
    given.handed_in.mkdir()
    for name in files:
        write(given.handed_in / name)
    run(given)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["score"] == 0
    assert sum(test["max_score"] for test in found["tests"]) == 9
    assert said in found["output"]


def test_gradescopes_results():
    one = result("anna", question("first", "rw", "w"))
    tests = gradescope.results(one)["tests"]
    assert [test["score"] for test in tests] == [2, 0, 0]
    assert [test["visibility"] for test in tests] == ["visible"] * 2 + ["after_published"]
    assert ["line of check" in test["output"] for test in tests] == [False, True, False]
    blocked = gradescope.results(result("anna", question("first", "b")))
    assert "score" not in blocked and "tests" not in blocked


def test_the_summary_names_what_to_look_at(tmp_path, not_run):
    given = options(tmp_path)
    write(tmp_path / "class" / "carl.ipynb", b'{"cells": [')
    write(tmp_path / "class" / "dora" / "one.ipynb")
    write(tmp_path / "class" / "dora" / "05-ddp-cluster.ipynb")
    write(tmp_path / "class" / "list.xlsx", b"x")
    other = '# setup\nexercise = Exercise("02-data-parallel")'
    write(tmp_path / "class" / "emil.ipynb", notebook(other))
    text = "\n".join(run(given))
    for words in (
        r"list\.xlsx.*ignored",
        r"(?s)not graded.*: 2\n +carl: [^\n]*damaged[^\n]*\n +emil: [^\n]*02-data-parallel",
        r"(?s)without any answer cell.*: 3\n +anna",
        r"(?s)several files.*\n +dora: 05-ddp-cluster\.ipynb was graded.*one\.ipynb",
        r"5 submissions, mean 0 of .*2 files not graded",
    ):
        assert re.search(words, text), words


def test_ctrl_c_says_how_many_are_kept(tmp_path, monkeypatch, capsys):
    def interrupted(options, progress):
        progress(3, 9)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "run", interrupted)
    monkeypatch.setattr(exercises, "_sandbox", lambda: "bwrap")
    with pytest.raises(SystemExit) as caught:
        exercises.grade("05", tmp_path, tmp_path / "out")
    assert caught.value.code == 130
    assert "3 submissions" in capsys.readouterr().err
