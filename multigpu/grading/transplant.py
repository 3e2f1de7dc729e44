"""A student's answers, taken out of the notebook that was handed in.

Only the text of the cells whose `grade_id`, or whose first line, names a question is taken:
outputs, checks and other cells of the student's are not used.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from multigpu.exercise.sources import answer_of
from multigpu.grading.solution import Solution

MAX_BYTES = 8 << 20
MAX_CELLS = 2000
MAX_ANSWER = 200_000


@dataclass
class Answers:
    """The answers by question, and what is to be said about the notebook.

    problem   why the notebook cannot be read; "" if it can
    """

    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problem: str = ""


def take(data: bytes, solution: Solution) -> Answers:
    """The answers in a notebook file. Never raises: what is wrong with it is said."""
    if len(data) > MAX_BYTES:
        return Answers(problem=f"the notebook has {len(data):,} bytes; at most {MAX_BYTES:,}")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        found = _cells(notebook)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        text = str(error) or type(error).__name__
        return Answers(problem=f"the file is no notebook: {text[:200]}")
    answers = Answers()
    if len(found) > MAX_CELLS:
        answers.notes.append(f"only the first {MAX_CELLS:,} of {len(found):,} cells were read")
    for cell in found[:MAX_CELLS]:
        _take_cell(cell, solution, answers)
    for question in solution.questions:
        if question.name not in answers.sources:
            answers.notes.append(f"{question.name}: there is no answer cell")
    return answers


def _cells(notebook: Any) -> list[Any]:
    """The cells of a notebook of format 3 or 4, and of later ones that have `cells`."""
    if type(notebook) is not dict:
        raise ValueError("expected an object")
    if type(notebook.get("cells")) is list:
        return notebook["cells"]
    if type(notebook.get("worksheets")) is list:
        return [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
    raise ValueError("it has no cells")


def _take_cell(cell: Any, solution: Solution, answers: Answers) -> None:
    if type(cell) is not dict:
        return
    source = cell.get("source", cell.get("input", ""))
    if type(source) is list:
        source = "".join(part for part in source if type(part) is str)
    if type(source) is not str:
        return
    # JSON can hold half a surrogate pair, which no file and no report can.
    source = source.encode(errors="replace").decode()
    metadata = cell.get("metadata")
    name = metadata.get("grade_id") if type(metadata) is dict else None
    known = {question.name for question in solution.questions}
    if type(name) is not str or name not in known:
        name = answer_of(source)  # some editors drop a cell's metadata
    if name not in known:
        return
    if cell.get("cell_type") != "code":
        answers.notes.append(f"{name}: its answer cell is not a code cell any more")
        return
    if name in answers.sources:
        answers.notes.append(f"{name}: there are two answer cells; the first one counts")
        return
    if len(source) > MAX_ANSWER:
        answers.notes.append(f"{name}: the answer is longer than {MAX_ANSWER:,} characters")
        source = ""
    answers.sources[name] = source


def is_blank(source: str, released: str) -> bool:
    """Whether an answer is still the released text, comments and spaces aside."""

    def bare(text: str) -> str:
        return re.sub(r"\s+", "", re.sub(r"#.*", "", text))

    return bare(source) in ("", bare(released))
