"""Points by hand, late penalties, marks, pseudonyms."""

import csv
import io
import json
import random
import re

import pytest
import small_exercise
from graded import question, result
from handed_in import notebook, write

from multigpu.cli import exercises
from multigpu.errors import UserError
from multigpu.grading import batch, grade, late, overrides, pseudonyms, reports, times
from multigpu.grading.csv_cells import cell
from multigpu.grading.feedback import page
from multigpu.grading.gradebook import canvas, gradebook, moodle
from multigpu.grading.junit import junit
from multigpu.grading.marking import Outcome
from multigpu.grading.marks import Marked, from_json, mark
from multigpu.grading.overrides import Override
from multigpu.grading.submissions import Submission
from multigpu.grading.transplant import take

RESULTS = [
    result("anna", question("first", "rw", "w"), question("second", "r")),
    result("=ben", question("first", "ww", "w"), question("second", "w")),
]


def override_file(tmp_path, *rows, header="student,question,points,reason", name="o.csv"):
    path = tmp_path / name
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_points_by_hand_for_a_question_and_a_check(tmp_path):
    path = override_file(
        tmp_path,
        'anna,first/2,1.5,"explained it, well"',
        "=ben,first/Check 1,2,oral",
        "anna,second,0,copied",
    )
    given = overrides.read(path, RESULTS)
    assert given == [
        Override("anna", "first", 2, 1.5, "explained it, well"),
        Override("=ben", "first", 1, 2.0, "oral"),
        Override("anna", "second", 0, 0.0, "copied"),
    ]
    anna, ben = mark(RESULTS, given)
    assert (anna.earned, anna.result.earned) == (3.5, 4.0), "what was measured stays"
    assert ben.earned == 2.0


@pytest.mark.parametrize("form", ["json", "semicolons", "excel"])
def test_other_forms_of_the_file(tmp_path, form):
    if form == "json":
        path = tmp_path / "o.json"
        row = {"student": "anna", "question": "first", "points": 1.5, "reason": "oral"}
        path.write_text(json.dumps([row]))
    elif form == "semicolons":
        path = override_file(
            tmp_path, "anna;first;1,5;oral", "", ";;;", header="Student;Question;Points;Reason"
        )
    else:
        path = override_file(
            tmp_path, "anna,first,1.5,oral", header="\ufeffstudent,question,points,reason,more"
        )
    assert overrides.read(path, RESULTS) == [Override("anna", "first", 0, 1.5, "oral")]


def test_a_student_copied_from_the_gradebook(tmp_path):
    path = override_file(tmp_path, f"{cell('=ben')},first,1,oral")
    assert cell("=ben") != "=ben"
    assert overrides.read(path, RESULTS)[0].student == "=ben"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("anna,fist,1,oral", "first"),
        ("anna,first/9,1,oral", "3"),
        ("anna,first/0,1,oral", "3"),
        ("anna,first/nothing,1,oral", "nothing"),
        ("anna,first,7,oral", "6"),
        ("anna,first/1,3,oral", "2"),
        ("anna,first,-1,oral", "-1"),
        ("anna,first,nan,oral", "nan"),
        ("anna,first,inf,oral", "inf"),
        ("anna,first,many,oral", "many"),
        ("anna,first,,oral", "number"),
        ("anna,first,1,", "reason"),
        ("anna,first,1,   ", "reason"),
        ("anna,first", "points"),
        ("anna,first,1,a\nanna,first,2,b", "another row"),
        ("anna,first,1,a\nanna,first/1,2,b", "another row"),
        ("anna,first/1,1,a\nanna,first,2,b", "another row"),
        ("anna,first/1,1,a\nanna,first/check 1,2,b", "another row"),
    ],
)
def test_rows_that_cannot_be_applied(tmp_path, row, named):
    path = override_file(tmp_path, row)
    with pytest.raises(UserError, match=named) as caught:
        overrides.read(path, RESULTS)
    assert str(path) in str(caught.value)
    assert "line" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("o.csv", b""),
        ("o.csv", b"student,points\n"),
        ("o.csv", b"\xff\xfe"),
        ("o.csv", b'student,question,points,reason\n"anna'),
        ("o.csv", b"student,question,points,reason\nan\x00na,first,1,x"),
        ("o.json", b"{}"),
        ("o.json", b"[1]"),
        ("o.json", b"[{}]"),
        ("o.json", b"["),
        ("o.json", b"[" * 100_000),
        ("none.csv", None),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, data):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=name):
        overrides.read(path, RESULTS)


def test_a_cell_larger_than_csv_reads(tmp_path):
    path = override_file(tmp_path, f"anna,first,1,{'x' * 200_000}")
    with pytest.raises(UserError, match=r"o\.csv"):
        overrides.read(path, RESULTS)


def test_points_by_hand_lift_a_block():
    blocked = result("anna", question("first", "rb"))
    [one] = mark([blocked])
    assert one.blocked
    assert one.total is None
    [one] = mark([blocked], [Override("anna", "first", 2, 1, "by eye")])
    assert one.total == 3
    [one] = mark([blocked], [Override("anna", "first", 0, 0, "copied")])
    assert one.total == 0
    assert not one.blocked


def test_a_file_that_could_not_be_read_has_all_questions():
    unread = result("cleo", problem="the file is no notebook")
    marks = mark([*RESULTS, unread], [Override("cleo", "second", 0, 2, "on paper")])
    cleo = marks[2]
    assert (cleo.total, cleo.points) == (2, 8)
    assert not cleo.questions[0].parts[0].measured.lines


def test_marks_survive_json():
    rule = late.parse("deadline=2026-11-30T12:00+00:00 10%/day")
    marks = mark(
        [result("anna", question("first", "rw"), submitted="2026-12-01T13:00:00+00:00")],
        [Override("anna", "first", 2, 1.5, "oral")],
        rule,
    )
    back = from_json(json.loads(json.dumps([one.to_json() for one in marks])))
    assert back == marks
    assert back[0].total == marks[0].total == pytest.approx(2.8)


RULE = "deadline=2026-11-30T23:59+01:00 10%/day max 50%"


@pytest.mark.parametrize(
    ("submitted", "percent"),
    [
        ("2026-11-30T23:59:00+01:00", 0),
        ("2026-11-30T23:59:59+01:00", 0),
        ("2026-12-01T00:00:00+01:00", 10),
        ("2026-11-30T22:59:30+00:00", 0),
        ("2026-11-30T23:00:00+00:00", 10),
        ("2026-12-01T23:59:59+01:00", 10),
        ("2026-12-02T00:00:00+01:00", 20),
        ("2026-12-05T12:00:00+01:00", 50),
        ("2031-12-05T12:00:00+01:00", 50),
        ("2000-01-01T00:00:00+00:00", 0),
    ],
)
def test_the_penalty(submitted, percent):
    penalty = late.parse(RULE).penalty(submitted)
    assert penalty.percent == percent
    assert bool(penalty.why) == bool(percent)


def test_hours_and_no_most():
    rule = late.parse("deadline=2026-11-30T12:00:00Z  2.5%/hour")
    assert rule.penalty("2026-11-30T12:00:00+00:00").percent == 0
    assert rule.penalty("2026-11-30T12:00:01+00:00").percent == 2.5
    assert rule.penalty("2026-11-30T14:00:01+00:00").percent == 7.5
    assert rule.penalty("2027-11-30T14:00:01+00:00").percent == 100


@pytest.mark.parametrize("submitted", ["", "yesterday", "2027-11-30T14:00:01"])
def test_a_submission_without_a_time_loses_nothing_and_says_so(submitted):
    [one] = mark(
        [result("anna", question("first", "rr"), submitted=submitted)], (), late.parse(RULE)
    )
    assert one.total == 4
    assert len(one.notes) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10%/day",
        "deadline=2026-11-30T23:59+01:00",
        "deadline=2026-11-30T23:59 10%/day",
        "deadline=tomorrow 10%/day",
        "deadline=2026-13-30T23:59+01:00 10%/day",
        "deadline=2026-11-30T23:59+01:00 10%/week",
        "deadline=2026-11-30T23:59+01:00 0%/day",
        "deadline=2026-11-30T23:59+01:00 110%/day",
        "deadline=2026-11-30T23:59+01:00 10%/day max 0%",
        "deadline=2026-11-30T23:59+01:00 10%/day max 50% more",
        "deadline=2026-11-30T23:59+01:00 -10%/day",
    ],
)
def test_no_rule(text):
    with pytest.raises(UserError, match="--late"):
        late.parse(text)


def test_a_penalty_is_never_more_than_what_was_earned():
    chance = random.Random(0)
    for _ in range(300):
        percent = chance.uniform(0.1, 100)
        rule = late.parse(f"deadline=2026-11-30T12:00Z {percent:.3f}%/hour max {percent:.3f}%")
        day = chance.randrange(1, 29)
        time = f"2026-12-{day:02}T{chance.randrange(24):02}:00:00+00:00"
        letters = "".join(chance.choices("rw", k=4))
        [one] = mark([result("anna", question("first", letters), submitted=time)], (), rule)
        assert 0 <= one.total <= one.earned <= one.points


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
        submitted="2026-12-01T13:00:00+00:00",
        notes=[
            "a.ipynb was graded; also handed in, and left out: Jane Doe 2.ipynb",
            "Jane.ipynb (upload 12345) was graded",
            student,
        ],
    )
    marks = mark([graded], [Override(student, "first", 1, 1, f"{student} said so")])
    [hidden] = pseudonyms.pseudonymized(marks, SECRET)
    reports = [
        gradebook([hidden]),
        canvas([hidden], "x"),
        moodle([hidden]),
        junit([hidden], "x"),
        page(hidden, "x", "x"),
        json.dumps(hidden.to_json()),
    ]
    for text in reports:
        assert "Jane" not in text
        assert "12345" not in text
        assert hidden.student in text
    assert "there are two answer cells" in page(hidden, "x", "x")
    assert hidden.total == marks[0].total
    assert marks[0].student == student, "the marks given are not changed"
    assert from_json([hidden.to_json()]) == [hidden]


def test_a_short_name_changes_no_other_word():
    marks = mark([result("a", question("first", "r"), notes=["a was late, as was Anna"])])
    [hidden] = pseudonyms.pseudonymized(marks, SECRET)
    assert hidden.result.notes == [f"{hidden.student} was late, as was Anna"]


def test_a_file_maps_pseudonyms_back():
    students = ["anna", "=ben", 'O"Brien']
    rows = list(csv.reader(io.StringIO(pseudonyms.key_table(students, SECRET))))
    assert rows[0] == ["pseudonym", "student"]
    assert {row[1] for row in rows[1:]} == {cell(student) for student in students}
    assert {row[0] for row in rows[1:]} == {
        pseudonyms.pseudonym(student, SECRET) for student in students
    }


def test_the_order_of_pseudonyms_says_nothing():
    marks: list[Marked] = mark([result(f"s{n:03}", question("q", "r")) for n in range(50)])
    hidden = pseudonyms.pseudonymized(marks, SECRET)
    names = [one.student for one in hidden]
    assert names == sorted(names)
    assert names != [pseudonyms.pseudonym(one.student, SECRET) for one in marks]


def test_points_of_a_student_without_a_submission_are_kept_and_named(tmp_path):
    path = override_file(tmp_path, "anne,first,1,oral", "anna,first,1,oral")
    given = overrides.read(path, RESULTS)
    assert [override.student for override in given] == ["anne", "anna"]
    [note] = overrides.nobodys(given, [one.student for one in RESULTS])
    assert "'anne'" in note
    assert "'anna'" in note


def test_a_deadline_without_a_time_is_answered_with_a_rule_that_works():
    with pytest.raises(UserError) as caught:
        late.parse("deadline=2026-11-20 10%/day")
    [form] = re.findall(r"deadline=\S+\d", str(caught.value))
    assert late.parse(f"{form} 10%/day").deadline.day == 20


def test_times_of_a_platform(tmp_path):
    path = override_file(
        tmp_path,
        "doe (Canvas 1);2026-12-01T00:30+01:00",
        f"{cell('=ben')};2026-11-30 12:00+01:00",
        "gone;2026-11-30T12:00Z",
        header="student;submitted",
    )
    handed_in = [Submission("doe (Canvas 1)", "a"), Submission("=ben", "b")]
    handed_in.append(Submission("cleo", "c", submitted="2026-11-29T00:00:00+00:00"))
    assert times.apply(times.read(path), handed_in) == ["gone"]
    rule = late.parse(RULE)
    assert [rule.penalty(one.submitted).percent for one in handed_in] == [10, 0, 0]
    assert all(one.submitted for one in handed_in)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("anna,2026-12-01T00:30", "zone"),
        ("anna,yesterday", "yesterday"),
        ("anna", "submitted"),
        ("anna,2026-12-01T00:30Z\nanna,2026-12-02T00:30Z", "two times"),
    ],
)
def test_times_that_cannot_be_applied(tmp_path, row, named):
    path = override_file(tmp_path, row, header="student,submitted")
    with pytest.raises(UserError, match=named):
        times.read(path)


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


def test_points_by_hand_are_checked_before_grading(tmp_path, not_run):
    bad = override_file(tmp_path, "anna,no_such,1,oral")
    with pytest.raises(UserError, match="no_such"):
        run(options(tmp_path, override=bad))
    assert not not_run
    assert not (tmp_path / "out").exists()


def test_a_folder_with_results_of_another_lesson_is_refused(tmp_path, not_run):
    given = options(tmp_path)
    run(given)
    run(given)
    (tmp_path / "out" / "lesson.txt").write_text("02-data-parallel\n")
    with pytest.raises(UserError, match=r"02-data-parallel.*another folder.*05-ddp-cluster"):
        run(given)
    assert len(not_run) == 2


def test_later_runs_keep_times_and_points_by_hand(tmp_path, not_run):
    times_file = override_file(
        tmp_path, "anna,2026-12-01T00:30+01:00", header="student,submitted", name="t.csv"
    )
    by_hand = override_file(tmp_path, "anna,mean,1,oral", "zoe,mean,1,oral")
    lines = run(options(tmp_path, times=times_file, override=by_hand, late=RULE))
    assert [line for line in lines if "'zoe'" in line and "kept" in line]
    times_file.unlink()
    by_hand.unlink()
    lines = run(options(tmp_path))
    anna, ben = reports.read_results(tmp_path / "out" / "marks.json")
    assert (anna.earned, anna.penalty.percent) == (1, 10)
    assert [line for line in lines if line.startswith("1 of 2 submissions without")]
    assert (ben.penalty.percent, ben.total) == (0, 0)
    lines = run(options(tmp_path, late="none", regrade=True))
    assert [line for line in lines if "anna" in line and "late penalty" in line]
    assert not [line for line in lines if "ben: total" in line]


def test_the_summary_names_what_to_look_at(tmp_path, not_run):
    given = options(tmp_path)
    write(tmp_path / "class" / "carl.ipynb", b'{"cells": [')
    write(tmp_path / "class" / "dora" / "one.ipynb")
    write(tmp_path / "class" / "dora" / "05-ddp-cluster.ipynb")
    write(tmp_path / "class" / "doe_LATE_1_2_x.ipynb")
    write(tmp_path / "class" / "list.xlsx", b"x")
    other = '# setup\nexercise = Exercise("02-data-parallel")'
    write(tmp_path / "class" / "emil.ipynb", notebook(other))
    text = "\n".join(run(given))
    for words in (
        r"list\.xlsx.*ignored",
        r"(?s)another lesson's notebook: 1\n +emil: .*02-data-parallel",
        r"(?s)not readable.*: 1\n +carl: .*damaged",
        r"(?s)without any answer cell.*: 4\n +anna",
        r"(?s)several files.*\n +dora: 05-ddp-cluster\.ipynb was graded.*one\.ipynb",
        r"(?s)without a time.*\n +doe",
        r"6 submissions, mean 0 of .*2 files not graded",
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
