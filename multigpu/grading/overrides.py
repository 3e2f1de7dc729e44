"""Points that an instructor gives by hand: `--override FILE`, applied after grading.

A CSV file with a header, or a JSON list of objects:

    student,question,points,reason
    anna,all_reduce,3,"explained it in the oral exam"
    ben,all_reduce/2,1,"the second check was wrong until Tuesday"

`question/2` is the second check of a question, and a check's title can stand for its number.
"""

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multigpu.errors import UserError, did_you_mean
from multigpu.grading.csv_cells import plain
from multigpu.grading.results import Result

COLUMNS = ("student", "question", "points", "reason")
MAX_BYTES = 16 << 20


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

    Raises UserError if the file cannot be read, for an unknown student, question or check, for
    points below 0 or above the most that there are, without a reason, and for two rows that
    give the same points.
    """
    results = list(results)
    overrides: dict[tuple[str, str, int], Override] = {}
    for where, row in _rows(path):
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


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The rows, each with the place that an error names."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(
                f"{path} is larger than {MAX_BYTES:,} bytes: give a CSV or JSON file."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8: save it as 'CSV UTF-8'.") from None
    rows = _json_rows(path, text) if path.suffix.lower() == ".json" else _csv_rows(path, text)
    for where, row in rows:
        missing = [name for name in COLUMNS if name not in row]
        if missing:
            raise UserError(
                f"{where}: there is no {' and no '.join(missing)}: expected "
                f"{', '.join(COLUMNS)}."
            )
    return rows


def _json_rows(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}.") from None
    if type(rows) is not list or any(type(row) is not dict for row in rows):
        raise UserError(f"{path}: expected a list of objects with {', '.join(COLUMNS)}.")
    return [(f"{path}, object {number}", row) for number, row in enumerate(rows, 1)]


def _csv_rows(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    header = text.partition("\n")[0]
    # Where a comma separates decimals, spreadsheets write semicolons between cells.
    delimiter = ";" if header.count(";") > header.count(",") else ","
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        names = [name.strip().lower() for name in next(lines, [])]
        rows = []
        for row in lines:
            if any(value.strip() for value in row):
                values = dict(zip(names, row, strict=False))
                rows.append((f"{path}, line {lines.line_num}", values))
    except csv.Error as error:
        raise UserError(f"{path} is no CSV: {error}.") from None
    if any(name not in names for name in COLUMNS):
        raise UserError(f"{path}: expected a first line with {', '.join(COLUMNS)}.")
    return rows


def _override(row: dict[str, Any], results: list[Result], where: str) -> Override:
    student = _student(row["student"], results, where)
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


def _student(given: object, results: list[Result], where: str) -> str:
    # Copied from a gradebook, a name that begins like a formula has its ' still.
    name = str(given)
    for result in results:
        if result.student in (name.strip(), plain(name.strip())):
            return result.student
    guess = did_you_mean(name, [result.student for result in results])
    raise UserError(
        f"{where}: there is no submission by {name!r}: {guess or 'see gradebook.csv.'}"
    )


def _points(given: object, where: str) -> float:
    try:
        points = float(str(given).strip().replace(",", "."))
    except ValueError:
        points = math.nan
    if not math.isfinite(points):
        raise UserError(f"{where}: points of {given!r}: expected a number.")
    return points
