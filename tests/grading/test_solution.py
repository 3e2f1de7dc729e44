"""A solution notebook is read, released and checked for mistakes of its author."""

import json

import pytest
import small_exercise

from multigpu.errors import UserError
from multigpu.grading import release, solution, transplant
from multigpu.grading.results import Note


@pytest.fixture
def small(tmp_path):
    return small_exercise.solution(tmp_path)


def test_questions_parts_and_points(small):
    assert [question.name for question in small.questions] == ["mean", "twice", "guess_bytes"]
    mean, twice, _ = small.questions
    assert mean.title == "1. The mean over ranks"
    assert [(part.title, part.points, part.hidden) for part in mean.parts] == [
        ("two ranks", 1, False),
        ("other sizes", 3, True),
    ]
    assert twice.needs == ["mean"]
    assert small.points == 9


def test_the_released_notebook_has_neither_solutions_nor_hidden_checks_nor_outputs(small):
    notebook = release.student_notebook(small)
    text = json.dumps(notebook)

    assert "get_world_size" not in text
    assert "4000" not in text
    assert "SOLUTION" not in text
    assert "other sizes" not in text
    assert "YOUR CODE HERE" in text
    assert not any(
        cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells
    )
    answers = {
        c.metadata["grade_id"]: c.source for c in notebook.cells if "grade_id" in c.metadata
    }
    assert list(answers) == ["mean", "twice", "guess_bytes"]
    assert answers["mean"].endswith("    raise NotImplementedError()")
    assert (
        answers["guess_bytes"] == "# answer: guess_bytes\nguess_bytes = None\n# YOUR CODE HERE"
    )


def test_the_same_solution_gives_the_same_files(small, tmp_path):
    first, second = (release.release(small, tmp_path / name) for name in ("a", "b"))

    assert first.name == second.name == f"{small.lesson}.ipynb"
    assert first.read_bytes() == second.read_bytes()


def replaced(old: str, new: str):
    cells = small_exercise.cells()
    for cell in cells:
        cell.source = cell.source.replace(old, new)
    return cells


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# answer: twice (needs mean)", "# answer: mean", ["'mean'", "two answer"]),
        ("(needs mean)", "(needs other)", ["'other'", "above"]),
        ("### BEGIN SOLUTION", "", ["BEGIN SOLUTION"]),
        ("points=1", "points=0", ["points"]),
        ("points=1", "points=p", ["points"]),
        ("points=1", "point=1", ["points"]),
        ('check("mean", "two', 'check("maen", "two', ["'maen'"]),
        ("other sizes", "two ranks", ["two checks", "two ranks"]),
        ("# setup", "", ["# setup"]),
        (f'Exercise("{small_exercise.LESSON}"', 'Exercise("01-one-gpu"', ["Exercise("]),
    ],
)
def test_an_authors_mistake_is_a_sentence(tmp_path, old, new, words):
    path = small_exercise.write(tmp_path, replaced(old, new))

    with pytest.raises(UserError) as caught:
        solution.read(path, small_exercise.LESSON)

    for word in words:
        assert word in str(caught.value)


def test_a_notebook_without_questions_is_refused(tmp_path):
    path = small_exercise.write(tmp_path, small_exercise.cells()[:3])

    with pytest.raises(UserError, match="no question"):
        solution.read(path, small_exercise.LESSON)


def test_lessons_are_named_by_slug_or_number():
    assert solution.slug_of("05") == solution.slug_of("05-ddp-cluster") == "05-ddp-cluster"
    with pytest.raises(UserError, match="05-ddp-cluster"):
        solution.slug_of("05-ddp-clusters")
    with pytest.raises(UserError, match="expected one of"):
        solution.slug_of("99")


def test_an_instructors_own_solution_is_found(tmp_path):
    with pytest.raises(UserError, match=f"{small_exercise.LESSON}.ipynb"):
        solution.find("05", tmp_path)
    small_exercise.write(tmp_path)
    assert solution.find("05", tmp_path).points == 9


# ---- a student's answers, taken out of a notebook -------------------------------------------


def notebook(*cells: dict) -> bytes:
    return json.dumps({"cells": list(cells), "nbformat": 4}).encode()


def code(source, name=None, **more) -> dict:
    metadata = {} if name is None else {"grade_id": name}
    return {"cell_type": "code", "source": source, "metadata": metadata} | more


def test_answers_are_found_by_grade_id_or_by_their_first_line(small):
    lines = ["# answer: guess_bytes\n", "guess_bytes = 1"]
    data = notebook(code("x", "mean"), code(lines))

    answers = transplant.take(data, small)

    assert answers.sources == {
        "mean": "x",
        "guess_bytes": "# answer: guess_bytes\nguess_bytes = 1",
    }
    assert answers.notes == [Note("there is no answer cell", question="twice")]


def test_the_first_of_two_answers_counts(small):
    answers = transplant.take(notebook(code("a", "mean"), code("b", "mean")), small)

    assert answers.sources["mean"] == "a"
    assert any("first one counts" in note.text for note in answers.notes)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"cells": 3}',
        b'{"worksheets": [3]}',
        b'{"cells": [' * 3000,
        b'{"cells": []}'.ljust(transplant.MAX_BYTES + 1),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_notebook_is_a_problem_not_an_exception(small, data):
    assert transplant.take(data, small).problem


@pytest.mark.parametrize(
    "cell",
    [
        3,
        None,
        {},
        {"metadata": 3, "source": "# answer: mean"},
        {"metadata": {"grade_id": ["mean"]}, "source": "x"},
        {"metadata": {"grade_id": "mean"}, "source": {"a": 1}, "cell_type": "code"},
        {"metadata": {"grade_id": "mean"}, "source": "x", "cell_type": "markdown"},
        {"metadata": {"grade_id": "other"}, "source": "x", "cell_type": "code"},
    ],
)
def test_odd_cells_are_no_answers(small, cell):
    answers = transplant.take(notebook(cell), small)

    assert answers.sources == {}
    assert answers.problem == ""


def test_format_9_is_read(small):
    new = json.dumps({"nbformat": 9, "cells": [code("y", "mean")]}).encode()

    assert transplant.take(new, small).sources == {"mean": "y"}


def test_an_endless_answer_is_left_out(small):
    answers = transplant.take(notebook(code("x" * 300_000, "mean")), small)

    assert answers.sources["mean"] == ""
    assert any("longer" in note.text for note in answers.notes)
