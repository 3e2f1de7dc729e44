"""The exercises of the course: complete, made from their scripts, and without solutions."""

import json
import re

import jupytext
import nbformat
import pytest
from commands import ROOT

from multigpu.course import LESSONS
from multigpu.grading import author, release, solution
from multigpu.notebooks.cells import numbered

SLUGS = [lesson.slug for lesson in LESSONS]


@pytest.mark.parametrize("slug", SLUGS)
def test_the_solution_is_its_script_executed(slug):
    folder = ROOT / "lessons" / slug
    script = jupytext.read(folder / author.SCRIPT, fmt="py:percent")
    notebook = nbformat.read(folder / solution.SOLUTION, as_version=4)

    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ], f"run: multigpu exercise run {slug}"
    assert [cell.execution_count for _, cell in numbered(notebook)] == [
        number for number, _ in numbered(notebook)
    ]
    found = solution.find(slug)
    for question in found.questions:
        for part in question.parts:
            outputs = found.notebook.cells[part.cell].outputs
            lines = "".join(output.text for output in outputs).splitlines()
            assert lines and all(line.startswith("right: ") for line in lines)


@pytest.mark.parametrize("slug", SLUGS)
def test_the_students_notebook_is_made_from_the_solution(slug):
    found = solution.find(slug)
    stored = (ROOT / "lessons" / slug / release.EXERCISE).read_text(encoding="utf-8")

    assert stored == solution.dumps(release.student_notebook(found))
    for question in found.questions:
        for answer in re.findall(
            r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", question.answer, re.DOTALL
        ):
            assert json.dumps(answer.strip("\n"), ensure_ascii=False)[1:-1] not in stored


@pytest.mark.parametrize("slug", SLUGS)
def test_the_points_are_those_that_the_text_promises(slug):
    found = solution.find(slug)
    text = "\n".join(found.sources("text"))

    assert found.points == 20
    assert re.search(r"\b20 points", text)
    promised = re.findall(r"^## \d+\. .*\((\d+) points?\)$", text, re.MULTILINE)
    points = [sum(part.points for part in question.parts) for question in found.questions]
    assert [float(number) for number in promised] == points


@pytest.mark.parametrize("slug", SLUGS)
def test_there_is_a_prediction_and_there_are_hidden_checks(slug):
    found = solution.find(slug)
    predictions = [q for q in found.questions if q.name.startswith("guess_")]
    written = [q for q in found.questions if q not in predictions]

    assert 3 <= len(found.questions) <= 4
    assert predictions
    for question in written:
        assert any(part.hidden for part in question.parts), question.name
        assert any(not part.hidden for part in question.parts), question.name


@pytest.mark.parametrize("slug", SLUGS)
def test_the_lessons_page_leads_to_its_exercise(slug):
    assert "(exercise.ipynb)" in (ROOT / "lessons" / slug / "README.md").read_text()
