"""A solution notebook: its questions, their checks and points.

What a code cell is, its text says (multigpu/exercise/sources.py):

    # setup             runs in the notebook and in the grader's kernel: it makes the Exercise
    # given             runs in the student's process, too
    # answer: NAME      the solution, between ### BEGIN SOLUTION and ### END SOLUTION
    with exercise.check("NAME", "title", points=2) as student:
                        a check; with hidden=True the student does not get it

All other cells are the student's, to read or to try things out; grading does not run them.
"""

import ast
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from multigpu.course import LESSONS, find_root
from multigpu.errors import UserError, did_you_mean
from multigpu.exercise.budget import SECONDS
from multigpu.exercise.sources import answer_of, is_given, needs_of
from multigpu.notebooks import cells

if TYPE_CHECKING:
    from nbformat import NotebookNode

Role = Literal["setup", "given", "answer", "check", "text"]
SOLUTION = "solution.ipynb"
LESSON = re.compile(r"""\bExercise\(\s*["']([\w-]+)["']""")
SECONDS_OF = re.compile(r"""\bExercise\([^)]*\bseconds\s*=\s*([\d.]+)""")
MARK = re.compile(r"^[ \t]*### (BEGIN|END) SOLUTION[ \t]*$", re.MULTILINE)
SETUP = re.compile(r"\s*# setup\s*$", re.MULTILINE)
CUT = re.compile(
    r"^([ \t]*)### BEGIN SOLUTION[ \t]*\n.*?^[ \t]*### END SOLUTION[ \t]*(?:\n|\Z)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Part:
    """A check. `number` is the cell's in Jupyter, n of In [n]; `cell` its index."""

    question: str
    title: str
    points: float
    hidden: bool
    number: int = 0
    cell: int = 0


@dataclass
class Question:
    """An answer and its checks, in the notebook's order.

    title    the heading above the answer
    answer   the solution's text
    needs    the questions whose answers this one calls
    """

    name: str
    title: str
    answer: str
    needs: list[str]
    parts: list[Part] = field(default_factory=list)

    @property
    def released(self) -> str:
        """The answer cell's text as a student gets it."""
        return without_solution(self.answer)


@dataclass
class Solution:
    """A lesson's solution. `roles` are those of the cells."""

    lesson: str
    path: Path
    notebook: "NotebookNode"
    roles: list[Role]
    questions: list[Question]

    @property
    def points(self) -> float:
        return sum(part.points for part in self.parts)

    @property
    def parts(self) -> list[Part]:
        return [part for question in self.questions for part in question.parts]

    @property
    def seconds(self) -> float:
        """What a check of an answer may take, as the exercise says."""
        setup = "\n".join(self.sources("setup"))
        said = SECONDS_OF.search(setup)
        return float(said[1]) if said else SECONDS

    def sources(self, role: Role) -> list[str]:
        """The texts of the cells of a role."""
        pairs = zip(self.notebook.cells, self.roles, strict=True)
        return [cell.source for cell, its_role in pairs if its_role == role]

    def answers(self) -> dict[str, str]:
        """The solution's text of each question."""
        return {question.name: question.answer for question in self.questions}


def slug_of(lesson: str) -> str:
    """The slug of a lesson: by its slug, its number or its folder's path. Raises UserError."""
    slugs = sorted(known.slug for known in LESSONS)
    name = Path(lesson).name
    number = name.zfill(2) if name.isdecimal() else name
    for slug in slugs:
        if number in (slug, slug.partition("-")[0]):
            return slug
    hint = did_you_mean(lesson, slugs) or f"expected one of {', '.join(slugs)}."
    raise UserError(f"there is no lesson {lesson!r}: {hint}")


def find(lesson: str, folder: Path | None = None) -> Solution:
    """The solution of a lesson, named by its slug or number.

    folder   an instructor's own solutions, SLUG.ipynb or SLUG/solution.ipynb; None for the
             course's

    Raises UserError if there is none, or if it cannot be graded with.
    """
    slug = slug_of(lesson)
    folder = folder or find_root() / "lessons"
    for path in (folder / f"{slug}.ipynb", folder / slug / SOLUTION):
        if path.exists():
            return read(path, slug)
    raise UserError(f"{folder} has no solution of lesson {slug}: expected {slug}.ipynb.")


def read(path: Path, lesson: str, released: bool = False) -> Solution:
    """Read a solution notebook. Raises UserError if it cannot be graded with.

    lesson     whose it must be; "" for any
    released   whether it is a student's, in which answers are not between markers
    """
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except FileNotFoundError:
        remedy = "give the path of your notebook" if released else f"{lesson} has no solution"
        raise UserError(f"there is no {path}: {remedy}.") from None
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        raise UserError(f"{path} cannot be read: {cells.first_line(error)}.") from None
    numbers = {id(cell): number for number, cell in cells.numbered(notebook)}
    questions: dict[str, Question] = {}
    roles: list[Role] = []
    heading = ""
    for index, cell in enumerate(notebook.cells):
        where = f"{path}, In [{numbers.get(id(cell), '?')}]"
        if cell.cell_type != "code":
            heading = _heading(cell.source) or heading
            roles.append("text")
            continue
        part = check_of(cell.source, where)
        name = answer_of(cell.source)
        if name and part is None:
            roles.append("answer")
            if name in questions:
                raise UserError(f"{where}: question {name!r} has two answer cells.")
            if not released:
                _check_markers(cell.source, where)
            needs = needs_of(cell.source)
            for needed in needs:
                if needed not in questions:
                    raise UserError(f"{where}: it needs {needed!r}, which is not above it.")
            questions[name] = Question(name, heading or name, cell.source, needs)
        elif part is not None:
            roles.append("check")
            if part.question not in questions:
                raise UserError(f"{where}: no answer above it is named {part.question!r}.")
            others = questions[part.question].parts
            if any(part.title == other.title for other in others):
                raise UserError(f"{where}: {part.question!r} has two checks {part.title!r}.")
            others.append(replace(part, number=numbers[id(cell)], cell=index))
        elif is_given(cell.source):
            roles.append("given")
        else:
            roles.append("setup" if SETUP.match(cell.source) else "text")
    if not questions:
        raise UserError(f"{path} has no question: no code cell begins with `# answer: NAME`.")
    for question in questions.values():
        if not question.parts:
            raise UserError(f"{path}: question {question.name!r} has no check.")
    setup = "\n".join(cell.source for cell in notebook.cells if SETUP.match(cell.source))
    named = LESSON.search(setup)
    if named is None or lesson not in ("", named[1]):
        expected = f'Exercise("{lesson or "SLUG"}")'
        raise UserError(f"{path}: a cell that begins with `# setup` must call {expected}.")
    return Solution(named[1], path, notebook, roles, list(questions.values()))


def check_of(source: str, where: str) -> Part | None:
    """The check that a cell holds, without its place; None if it holds none.

    Raises UserError for two checks in a cell, and for arguments that are not literals.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None  # a magic, for example
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "check"
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "exercise"
    ]
    if not calls:
        return None
    if len(calls) > 1:
        raise UserError(f"{where}: the cell has {len(calls)} checks, expected one.")
    try:
        words = [ast.literal_eval(word) for word in calls[0].args]
        options: dict[str, Any] = {
            str(option.arg): ast.literal_eval(option.value) for option in calls[0].keywords
        }
        question, title = words
        part = Part(question, title, options.pop("points"), options.pop("hidden", False))
    except (ValueError, KeyError):
        part = None
    if part is None or options or type(part.points) not in (int, float) or part.points <= 0:
        raise UserError(
            f'{where}: expected exercise.check("question", "title", points=number above 0), '
            f"and hidden=True or nothing."
        )
    return part


def _heading(text: str) -> str:
    """The text of the first heading, without a remark in brackets at its end."""
    match = re.search(r"^#+ (.*?)(?: \([^()]*\))?\s*$", text, re.MULTILINE)
    return match[1] if match else ""


def _check_markers(source: str, where: str) -> None:
    """Raise UserError unless BEGIN and END alternate."""
    kinds = MARK.findall(source)
    if not kinds or kinds != ["BEGIN", "END"] * (len(kinds) // 2):
        raise UserError(
            f"{where}: an answer needs the lines ### BEGIN SOLUTION and ### END SOLUTION, in "
            f"turn."
        )


def without_solution(source: str) -> str:
    """The answer cell as a student gets it.

    In place of a solution stands `# YOUR CODE HERE`; within a function, a line that raises
    NotImplementedError follows.
    """

    def unanswered(match: re.Match[str]) -> str:
        indent = match[1]
        line = f"{indent}# YOUR CODE HERE\n"
        return line + f"{indent}raise NotImplementedError()\n" if indent else line

    return CUT.sub(unanswered, source).rstrip("\n")


def dumps(notebook: "NotebookNode") -> str:
    """The notebook's file."""
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
