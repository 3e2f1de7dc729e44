"""A solution notebook: its questions, their points, and whether it is complete.

A code cell has one of these tags, and its question's name as `grade_id`:

    setup     runs before the answers, for the student and in the checks
    answer    the solution, between the lines ### BEGIN SOLUTION and ### END SOLUTION
    check     a visible check with `points`
    hidden    a check with `points` that the student does not get

A question has one answer and at least one check. Its `title` is in the answer's metadata.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.errors import UserError
from multigpu.notebooks import cells

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROLES = ("setup", "answer", "check", "hidden")
BEGIN = re.compile(r"^[ \t]*### BEGIN SOLUTION[ \t]*$", re.MULTILINE)
END = re.compile(r"^[ \t]*### END SOLUTION[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A check.

    number   the cell's number in Jupyter: n of In [n]
    cell     the cell's index in the notebook
    """

    number: int
    cell: int
    points: float
    hidden: bool


@dataclass
class Question:
    """An answer and its checks, in the notebook's order."""

    name: str
    title: str
    cell: int
    parts: list[Part] = field(default_factory=list)

    @property
    def points(self) -> float:
        return sum(part.points for part in self.parts)


@dataclass
class Solution:
    """A lesson's solution.

    setup   indices of the cells that run before the answers
    """

    lesson: str
    path: Path
    notebook: "NotebookNode"
    setup: list[int]
    questions: list[Question]

    @property
    def points(self) -> float:
        return sum(question.points for question in self.questions)

    def source(self, cell: int) -> str:
        return self.notebook.cells[cell].source


def read(path: Path, lesson: str) -> Solution:
    """Read a solution notebook. Raises UserError if it cannot be graded with."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except FileNotFoundError:
        raise UserError(f"there is no {path}: lesson {lesson} has no solution there.") from None
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        raise UserError(f"{path} cannot be read: {cells.first_line(error)}.") from None
    numbers = {id(cell): number for number, cell in cells.numbered(notebook)}
    setup: list[int] = []
    questions: dict[str, Question] = {}
    for index, cell in enumerate(notebook.cells):
        role = role_of(cell)
        if cell.cell_type != "code" or role is None:
            continue
        where = f"{path}, cell {numbers.get(id(cell), '?')}"
        name = cell.metadata.get("grade_id")
        if role == "setup":
            setup.append(index)
        elif not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_]+", name):
            raise UserError(
                f"{where}: an {role} cell needs a grade_id of small letters, digits and "
                f"underscores; it has {name!r}."
            )
        elif role == "answer":
            if name in questions:
                raise UserError(f"{where}: question {name!r} has two answer cells.")
            _check_markers(cell.source, where)
            title = str(cell.metadata.get("title", name.replace("_", " ")))
            questions[name] = Question(name, title, index)
        else:
            if name not in questions:
                raise UserError(f"{where}: the check of {name!r} comes before its answer.")
            points = cell.metadata.get("points")
            if type(points) not in (int, float) or points <= 0:
                raise UserError(f"{where}: a check needs points above 0; it has {points!r}.")
            part = Part(numbers[id(cell)], index, points, role == "hidden")
            questions[name].parts.append(part)
    if not questions:
        raise UserError(f"{path} has no question: no cell has the tag 'answer'.")
    for question in questions.values():
        if not question.parts:
            raise UserError(f"{path}: question {question.name!r} has no check.")
    return Solution(lesson, path, notebook, setup, list(questions.values()))


def role_of(cell: "NotebookNode") -> str | None:
    """The cell's role; None for a cell that is only read. Raises UserError for two roles."""
    found = [tag for tag in cells.tags(cell) if tag in ROLES]
    if len(found) > 1:
        raise UserError(f"a cell has the tags {' and '.join(found)}: a cell has one role.")
    return found[0] if found else None


def _check_markers(source: str, where: str) -> None:
    """Raise UserError unless BEGIN and END alternate."""
    marks = sorted(
        [(match.start(), "BEGIN") for match in BEGIN.finditer(source)]
        + [(match.start(), "END") for match in END.finditer(source)]
    )
    kinds = [kind for _, kind in marks]
    if not kinds or kinds != ["BEGIN", "END"] * (len(kinds) // 2):
        raise UserError(
            f"{where}: an answer needs the lines ### BEGIN SOLUTION and ### END SOLUTION, in "
            f"turn."
        )


def without_solution(source: str) -> str:
    """The answer cell as a student gets it: each solution becomes a line that raises."""

    def replace(match: re.Match[str]) -> str:
        indent = match[1]
        return f"{indent}# YOUR CODE HERE\n{indent}raise NotImplementedError()\n"

    pattern = re.compile(
        r"^([ \t]*)### BEGIN SOLUTION[ \t]*\n.*?^[ \t]*### END SOLUTION[ \t]*(?:\n|\Z)",
        re.MULTILINE | re.DOTALL,
    )
    return pattern.sub(replace, source)


def dumps(notebook: "NotebookNode") -> str:
    """The notebook's file."""
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
