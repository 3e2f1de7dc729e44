"""gradebook.csv, and the forms that Canvas and Moodle import: no formula, no 0 for blocked."""

import csv
import io

import pytest
from graded import question, result

from multigpu.grading.csv_cells import number
from multigpu.grading.gradebook import canvas, gradebook, moodle
from multigpu.grading.results import Account, Note

FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d")
NAMES = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "a;=1+1",
    'a;"=1+1',
    'x","=1+1',
    "'quoted'",
    "O'Brien",
    'says "no"',
    "two\nlines",
    "\uff1d1+1",
    "\ud800",
    "\x1b[31m",
    "Jane, Doe",
]


def read(text):
    return list(csv.reader(io.StringIO(text, newline="")))


UNREAD = question("first", "ww"), question("second", "w", "w", points=0.5)


def test_the_gradebook():
    marks = [
        result("anna", question("first", "rr"), question("second", "r", "w", points=0.5)),
        result("ben", question("first", "rw"), question("second", "b", "r", points=0.5)),
        result("cleo", *UNREAD, problem="the file is no notebook"),
    ]
    header, anna, ben, cleo = read(gradebook(marks))
    assert header == [
        "student",
        "first",
        "second",
        "total",
        "out of",
        "status",
        "notes",
    ]
    assert anna == ["anna", "4", "0.5", "4.5", "5", "graded", ""]
    assert ben == ["ben", "2", "", "", "5", "blocked", ""]
    assert cleo[:6] == ["cleo", "0", "0", "0", "5", "not readable"]
    assert "no notebook" in cleo[6]


def test_canvas():
    marks = [
        result(
            "doejane (Canvas 12345)",
            question("first", "rr"),
            account=Account("Canvas", "12345"),
        ),
        result("zoe (Canvas 12345)", question("first", "rw")),
        result("login7", question("first", "rw")),
        result("smith_12", question("first", "ww")),
        result("    Points Possible", question("first", "rr")),
    ]
    rows = read(canvas(marks, "05 DDP (4711)"))
    assert rows[0] == ["Student", "ID", "SIS Login ID", "Section", "05 DDP (4711)"]
    assert rows[1] == ["    Points Possible", "", "", "", "4"]
    assert rows[2] == ["doejane", "12345", "", "", "4"]
    assert rows[3][1:3] == ["", "zoe (Canvas 12345)"], "no account of Canvas"
    assert rows[4] == ["login7", "", "login7", "", "2"]
    assert rows[5] == ["smith_12", "", "smith_12", "", "0"], "no Canvas number"
    assert sum("Points Possible" in row[0] for row in rows) == 1


def test_moodle():
    marks = [
        result(
            "Jane Doe (Moodle 12345)",
            question("first", "rr"),
            account=Account("Moodle", "12345"),
        ),
        result("login7", question("first", "rw")),
    ]
    rows = [dict(zip(read(moodle(marks))[0], row, strict=True)) for row in read(moodle(marks))]
    assert {"Identifier", "Grade", "Last modified (grade)", "Full name"} <= set(rows[0])
    assert rows[1]["Identifier"] == "Participant 12345"
    assert rows[1]["Full name"] == "Jane Doe"
    assert rows[1]["Grade"] == "4"
    assert rows[2]["Identifier"] == ""
    assert rows[2]["Username"] == "login7"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", [gradebook, moodle, lambda marks: canvas(marks, "=evil()")])
def test_no_cell_is_a_formula(form, name):
    account = Account("Moodle", name)
    notes = [Note(name)]
    marks = [result(name, question("first", "rr"), problem=name, notes=notes, account=account)]
    text = form(marks)
    text.encode("utf-8")
    for delimiter in ",;\t":
        # Spreadsheets of other countries open the same file with another separator.
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            assert not [value for value in row if value.lstrip(' "').startswith(FORMULAS)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3.0, "3"),
        (0.1 + 0.2, "0.3"),
        (2.346, "2.35"),
        (1e-9, "0"),
        (10, "10"),
        (0, "0"),
        (None, ""),
    ],
)
def test_points_have_at_most_two_decimals(value, expected):
    assert number(value) == expected


def test_a_file_that_was_not_graded_is_no_zero_on_a_platform():
    unread = result("cleo", question("first", "ww"), problem="the file is damaged")
    marks = [result("anna", question("first", "rr")), unread]
    assert read(canvas(marks, "05"))[3] == ["cleo", "", "cleo", "", ""]
    row = dict(zip(read(moodle(marks))[0], read(moodle(marks))[2], strict=True))
    assert row["Grade"] == ""
    assert read(gradebook(marks))[2][2] == "0"
