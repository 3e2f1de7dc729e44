"""Twelve made-up submissions to practise grading on: `multigpu exercise practice LESSON`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.files import atomic
from multigpu.grading.release import student_notebook
from multigpu.grading.solution import Solution, dumps

if TYPE_CHECKING:
    from nbformat import NotebookNode

Change = Callable[["NotebookNode"], None]


def write(solution: Solution, folder: Path) -> list[Path]:
    """Write STUDENT.ipynb for each student. Returns the paths. Raises OSError."""
    import nbformat

    folder.mkdir(parents=True, exist_ok=True)
    right = solution.answers()
    first, *others = right
    without_first = {name: right[name] for name in others}
    metadata = {"grade_id": first}
    second = nbformat.v4.new_code_cell("another = 'answer'", metadata=metadata)
    made = {
        "anna": _notebook(solution, right),
        "bruno": _notebook(solution, {}),
        "chen": _notebook(solution, {first: right[first]}),
        "dana": _notebook(solution, without_first),
        "emil": _notebook(solution, right | {first: "def answer(:\n    pass"}),
        "fatima": _notebook(solution, right | {first: "while True:\n    pass"}),
        "gita": _notebook(solution, right, _delete_checks),
        "hugo": _notebook(solution, right, lambda notebook: notebook.cells.append(second)),
        "ines": _notebook(solution, right | {first: "import os\n\nos._exit(0)"}),
        "jan": _notebook(solution, right)[:100],
        "kim": _notebook(solution, right | {first: "print('x' * 10_000)\n" + right[first]}),
        "lena": _notebook(solution, right, lambda notebook: notebook.cells.reverse()),
    }
    paths = []
    for student, text in made.items():
        path = folder / f"{student}.ipynb"
        with atomic(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _notebook(
    solution: Solution, answers: dict[str, str], change: Change | None = None
) -> str:
    notebook = student_notebook(solution)
    for cell in notebook.cells:
        name = cell.metadata.get("grade_id")
        cell.source = answers.get(name, cell.source)
    if change:
        change(notebook)
    return dumps(notebook)


def _delete_checks(notebook: "NotebookNode") -> None:
    notebook.cells = [cell for cell in notebook.cells if "exercise.check" not in cell.source]
