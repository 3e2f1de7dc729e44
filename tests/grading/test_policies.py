"""The roster, Gradescope's file, pseudonyms, and what the command says."""

import csv
import io
import json
import re

import pytest
import small_exercise
from graded import question, result
from handed_in import notebook, write

from multigpu.cli import exercises
from multigpu.errors import UserError
from multigpu.grading import batch, grade, gradescope, pseudonyms, roster
from multigpu.grading.csv_cells import cell
from multigpu.grading.feedback import page
from multigpu.grading.gradebook import canvas, gradebook, moodle
from multigpu.grading.marking import Outcome
from multigpu.grading.results import Account, Kind, Note, Result
from multigpu.grading.submissions import Submission
from multigpu.grading.transplant import take

SECRET = b"a secret of 16 bytes or more"


def test_pseudonyms_are_stable_and_need_the_secret():
    first = pseudonyms.pseudonym("anna", SECRET)
    assert first == pseudonyms.pseudonym("anna", SECRET)
    assert re.fullmatch(r"student-[0-9a-z]{10}", first)
    assert first != pseudonyms.pseudonym("anna", SECRET + b"x")
    assert len({pseudonyms.pseudonym(str(n), SECRET) for n in range(5_000)}) == 5_000
    with pytest.raises(UserError, match="16"):
        pseudonyms.pseudonym("anna", b"short")


def test_no_report_names_a_student_with_a_pseudonym():
    student = "Jane Doe (Moodle 12345)"
    graded = result(
        student,
        question("first", "rw", notes=["first: there are two answer cells"]),
        account=Account("Moodle", "12345"),
        notes=[
            Note("a.ipynb was graded; also handed in, and left out: Jane Doe 2.ipynb"),
            Note("Jane.ipynb (upload 12345) was graded"),
            Note(student, Kind.LATE),
        ],
    )
    [hidden] = pseudonyms.pseudonymized([graded], SECRET)
    reports = [
        gradebook([hidden]),
        canvas([hidden], "x"),
        moodle([hidden]),
        page(hidden, "x", "x"),
        json.dumps(hidden.to_json()),
    ]
    for text in reports:
        assert "Jane" not in text
        assert "12345" not in text
        assert hidden.student in text
    assert "there are two answer cells" in page(hidden, "x", "x")
    assert hidden.earned == graded.earned
    assert graded.student == student, "the result given is not changed"
    assert Result.from_json(json.loads(json.dumps(hidden.to_json()))) == hidden


def test_a_short_name_changes_no_other_word():
    graded = result("a", question("first", "r"), notes=[Note("a was late, as was Anna")])
    [hidden] = pseudonyms.pseudonymized([graded], SECRET)
    assert hidden.notes == [Note(f"{hidden.student} was late, as was Anna")]


def test_a_file_maps_pseudonyms_back():
    students = ["anna", "=ben", 'O"Brien']
    rows = list(csv.reader(io.StringIO(pseudonyms.key_table(students, SECRET))))
    assert rows[0] == ["pseudonym", "student"]
    assert {row[1] for row in rows[1:]} == {cell(student) for student in students}
    assert {row[0] for row in rows[1:]} == {
        pseudonyms.pseudonym(student, SECRET) for student in students
    }


def test_the_order_of_pseudonyms_says_nothing():
    graded = [result(f"s{n:03}", question("q", "r")) for n in range(50)]
    hidden = pseudonyms.pseudonymized(graded, SECRET)
    names = [one.student for one in hidden]
    assert names == sorted(names)
    assert names != [pseudonyms.pseudonym(one.student, SECRET) for one in graded]


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

    def fake(solution, submissions, settings, progress):
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


def test_gradescopes_results(tmp_path, not_run):
    path = tmp_path / "results.json"
    with pytest.raises(UserError, match=r"for one submission; .* has 2"):
        run(options(tmp_path, gradescope=path))
    given = options(tmp_path, gradescope=path)
    (tmp_path / "class" / "ben.ipynb").unlink()
    run(given)
    found = json.loads(path.read_text())
    assert found["score"] == 0
    assert sum(test["max_score"] for test in found["tests"]) == 9

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
        r"(?s)another lesson's notebook: 1\n +emil: .*02-data-parallel",
        r"(?s)not readable.*: 1\n +carl: .*damaged",
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
