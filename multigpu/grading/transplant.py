"""A student's answers, taken out of the notebook that was handed in.

Only the text of the cells whose `grade_id`, or whose first line, names a question is taken:
outputs, checks and other cells of the student's are not used.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from multigpu.course import LESSONS
from multigpu.exercise.sources import answer_of
from multigpu.grading.results import Kind, Note
from multigpu.grading.solution import LESSON, SETUP, Solution

MAX_BYTES = 8 << 20
MAX_CELLS = 2000
MAX_ANSWER = 200_000
DAMAGED = "the file is damaged or cut off, and no notebook can be read from it"


@dataclass
class Answers:
    """The answers by question, and what is to be said about the notebook.

    problem   why the notebook cannot be graded; "" if it can
    lesson    the other lesson whose notebook it is; "" if it is none
    """

    sources: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problem: str = ""
    lesson: str = ""


def take(data: bytes, solution: Solution) -> Answers:
    """The answers in a notebook file. Never raises: what is wrong with it is said."""
    if len(data) > MAX_BYTES:
        return Answers(problem=f"the notebook has {len(data):,} bytes; at most {MAX_BYTES:,}")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return Answers(problem=DAMAGED)
    cells = notebook.get("cells") if type(notebook) is dict else None
    if type(cells) is not list:
        return Answers(problem="the file is no notebook: it has no cells")
    answers = Answers()
    if len(cells) > MAX_CELLS:
        text = f"only the first {MAX_CELLS:,} of {len(cells):,} cells were read"
        answers.notes.append(Note(text))
    for cell in cells[:MAX_CELLS]:
        _take_cell(cell, solution, answers)
    other = _other_lesson(cells[:MAX_CELLS], solution)
    # With all answer cells of this lesson, a changed setup costs nothing: it is not used.
    if other and len(answers.sources) < len(solution.questions):
        return Answers(problem=f"this is the notebook of {other}", lesson=other)
    if not answers.sources:
        text = f"the notebook has none of the answer cells of {solution.lesson}"
        answers.notes.append(Note(text, Kind.NO_ANSWER))
    for question in solution.questions:
        if question.name not in answers.sources:
            text = "there is no answer cell"
            answers.notes.append(Note(text, question=question.name))
    return answers


def _source(cell: Any) -> str:
    """A cell's text; "" if it has none."""
    source = cell.get("source") if type(cell) is dict else ""
    if type(source) is list:
        source = "".join(part for part in source if type(part) is str)
    # JSON can hold half a surrogate pair, which no file and no report can.
    return source.encode(errors="replace").decode() if type(source) is str else ""


def _other_lesson(cells: list[Any], solution: Solution) -> str:
    """The lesson of the course, but the solution's, that the setup cell names; "" if none."""
    others = {known.slug for known in LESSONS} - {solution.lesson}
    setups = [source for source in map(_source, cells) if SETUP.match(source)]
    named = [match[1] for match in map(LESSON.search, setups) if match]
    return next((name for name in named if name in others), "")


def _take_cell(cell: Any, solution: Solution, answers: Answers) -> None:
    source = _source(cell)
    if not source:
        return
    metadata = cell.get("metadata")
    name = metadata.get("grade_id") if type(metadata) is dict else None
    known = {question.name for question in solution.questions}
    if type(name) is not str or name not in known:
        name = answer_of(source)  # some editors drop a cell's metadata
    if name not in known:
        return
    problem = ""
    if cell.get("cell_type") != "code":
        problem = "its answer cell is not a code cell any more"
    elif name in answers.sources:
        problem = "there are two answer cells; the first one counts"
    elif len(source) > MAX_ANSWER:
        problem = f"the answer is longer than {MAX_ANSWER:,} characters"
        answers.sources[name] = ""
    else:
        answers.sources[name] = source
    if problem:
        answers.notes.append(Note(problem, question=name))


def is_blank(source: str, released: str) -> bool:
    """Whether an answer is still the released text, comments and spaces aside."""

    def bare(text: str) -> str:
        return re.sub(r"\s+", "", re.sub(r"#.*", "", text))

    return bare(source) in ("", bare(released))
