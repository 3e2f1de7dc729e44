"""Points that an instructor gives by hand: `--override FILE`, applied after grading.

A CSV file with a header, or a JSON list of objects:

    student,question,points,reason
    anna,all_reduce,3,"explained it in the oral exam"
    ben,all_reduce/2,1,"the second check was wrong until Tuesday"

`question/2` is the second check of a question, and a check's title can stand for its number.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multigpu.errors import UserError, did_you_mean
from multigpu.grading import given_rows
from multigpu.grading.csv_cells import plain
from multigpu.grading.results import Result

COLUMNS = ("student", "question", "points", "reason")


@dataclass(frozen=True)
class Override:
    """Points for a student's question, or for its check `check` (the first is 1; 0: all)."""

    student: str
    question: str
    check: int
    points: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A dict for json.dump."""
        return asdict(self)


def read(path: Path, results: Iterable[Result]) -> list[Override]:
    """Read the points given by hand. `results` say which students and questions there are.

    Points of a student who has no submission are kept: nobodys() names them. Raises UserError
    if the file cannot be read, for an unknown question or check, for points below 0 or above
    the most that there are, without a reason, and for two rows that give the same points.
    """
    results = list(results)
    overrides: dict[tuple[str, str, int], Override] = {}
    for where, row in given_rows.read(path, COLUMNS):
        override = _override(row, results, where)
        key = (override.student, override.question, override.check)
        whole = (override.student, override.question, 0)
        of_checks = [other for other in overrides if other[:2] == key[:2] and other[2]]
        if key in overrides or whole in overrides or (not override.check and of_checks):
            raise UserError(
                f"{where}: another row already gives points for question "
                f"{override.question!r} of {override.student!r}: leave one of them."
            )
        overrides[key] = override
    return list(overrides.values())


def _override(row: dict[str, Any], results: list[Result], where: str) -> Override:
    student = _student(row["student"], results)
    name, _, check_name = str(row["question"]).strip().partition("/")
    known = {question.name: question for result in results for question in result.questions}
    if name not in known:
        raise UserError(
            f"{where}: there is no question {name!r}: "
            f"{did_you_mean(name, known) or 'there are ' + ', '.join(known)}"
        )
    question = known[name]
    check = 0
    most = question.points
    if check_name:
        titles = [part.title.strip().casefold() for part in question.parts]
        if check_name.isdecimal() and 1 <= int(check_name) <= len(titles):
            check = int(check_name)
        elif check_name.strip().casefold() in titles:
            check = titles.index(check_name.strip().casefold()) + 1
        else:
            raise UserError(
                f"{where}: question {name!r} has no check {check_name!r}: give its title or "
                f"its number, from 1 to {len(titles)}."
            )
        most = question.parts[check - 1].points
    points = _points(row["points"], where)
    if not 0 <= points <= most:
        raise UserError(f"{where}: {points:g} points: expected 0 to {most:g}.")
    reason = str(row["reason"] or "").strip()
    if not reason:
        raise UserError(f"{where}: the reason is missing: say why the points are given.")
    return Override(student, name, check, points, reason)


def nobodys(overrides: Iterable[Override], students: Iterable[str]) -> list[str]:
    """Notes on points by hand for students who have no submission, or not any more."""
    students = list(students)
    unknown = dict.fromkeys(
        override.student for override in overrides if override.student not in students
    )
    return [
        f"points by hand for {name!r} are kept, but there is no submission by this student: "
        f"{did_you_mean(name, students) or 'gradebook.csv has the names'}"
        for name in unknown
    ]


def _student(given: object, results: list[Result]) -> str:
    # Copied from a gradebook, a name that begins like a formula has its ' still.
    name = str(given).strip()
    for result in results:
        if result.student in (name, plain(name)):
            return result.student
    return plain(name)


def _points(given: object, where: str) -> float:
    try:
        points = float(str(given).strip().replace(",", "."))
    except ValueError:
        points = math.nan
    if not math.isfinite(points):
        raise UserError(f"{where}: points of {given!r}: expected a number.")
    return points
