"""The student's notebook, made from the solution: `multigpu release LESSON… -o DIR`."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.exercise.sources import answer_of
from multigpu.files import atomic
from multigpu.grading.solution import Solution, dumps, without_solution
from multigpu.notebooks import cells

if TYPE_CHECKING:
    from nbformat import NotebookNode

EXERCISE = "exercise.ipynb"


def student_notebook(solution: Solution) -> "NotebookNode":
    """The notebook without solutions, hidden checks, outputs and guesses.

    Answer cells have the question's name as grade_id. JupyterLab lets a student edit them, but
    not delete them, and neither edit nor delete what is given and the checks; grading does not
    rely on it.
    """
    notebook = copy.deepcopy(solution.notebook)
    hidden = {part.cell for part in solution.parts if part.hidden}
    kept = []
    for index, (cell, role) in enumerate(zip(notebook.cells, solution.roles, strict=True)):
        if index in hidden:
            continue
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
        if role == "answer":
            cell.metadata["grade_id"] = answer_of(cell.source)
            cell.source = without_solution(cell.source)
            cell.metadata["deletable"] = False
        elif role in ("check", "setup", "given"):
            cell.metadata["deletable"] = False
            cell.metadata["editable"] = False
        if cells.GUESS in cells.tags(cell):
            cell.source = cells.without_guesses(cell.source)
        kept.append(cell)
    notebook.cells = kept
    notebook.metadata.pop("multigpu", None)  # hashes of the solution's outputs
    return notebook


def release(solution: Solution, folder: Path) -> Path:
    """Write SLUG.ipynb, and return its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    notebook = folder / f"{solution.lesson}.ipynb"
    with atomic(notebook) as temporary:
        temporary.write_text(dumps(student_notebook(solution)), encoding="utf-8")
    return notebook
