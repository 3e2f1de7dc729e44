"""Who is in the class: `--roster FILE`.

A CSV file with a header: your own with the column `student`, Canvas's export of its gradebook
(`Student`, `ID`), or Moodle's grading worksheet (`Identifier`, `Full name`). A student is
found by the platform's number, or by the key in gradebook.csv.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multigpu.errors import UserError
from multigpu.grading.csv_cells import plain
from multigpu.grading.results import Kind, Note
from multigpu.grading.submissions import Submission
from multigpu.grading.texts import one_line

MAX_BYTES = 16 << 20
# Where a comma separates decimals, spreadsheets write semicolons between cells.
DELIMITERS = ",;\t"
NAMES = ("student", "full name")
NUMBERS = ("id", "identifier")


@dataclass(frozen=True)
class Listed:
    """A row: the name, and the platform's number, "" if the file has none."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name} ({self.number})".strip() if self.number else self.name


def read(path: Path) -> list[Listed]:
    """The students. Raises UserError if the file cannot be read, or names one twice."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
        header = text.partition("\n")[0]
        delimiter = max(DELIMITERS, key=header.count)
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{path} is no CSV file in UTF-8: save it as 'CSV UTF-8'.") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} is larger than {MAX_BYTES:,} bytes: give a CSV file.")
    names = [name.strip().lower() for name in rows[0]] if rows else []
    student = next((names.index(name) for name in NAMES if name in names), None)
    if student is None:
        raise UserError(
            f"{path}: the first line is {header.strip()[:80]!r}: expected the column student."
        )
    number = next((names.index(name) for name in NUMBERS if name in names), None)
    found: dict[Listed, int] = {}
    for line, row in enumerate(rows[1:], 2):
        one = Listed(_cell(row, student), _cell(row, number).removeprefix("Participant "))
        # Canvas's second row has the most points.
        if not (one.name or one.number) or one.name == "Points Possible":
            continue
        if one in found:
            raise UserError(
                f"{path}, line {line}: {one} is in line {found[one]}, too: leave one of them."
            )
        found[one] = line
    return list(found)


def _cell(row: Sequence[str], column: int | None) -> str:
    there = column is not None and column < len(row)
    return one_line(plain(row[column].strip())) if there else ""


def compare(roster: Iterable[Listed], submissions: Iterable[Submission]) -> list[str]:
    """The students who have handed in nothing; those not on the roster get a note."""
    left = list(roster)
    unknown = list(submissions)
    # All numbers come before all names: another student may have the same name.
    for is_of in (_by_number, _by_name):
        for one in list(unknown):
            mine = next((each for each in left if is_of(each, one)), None)
            if mine is not None:
                left.remove(mine)
                unknown.remove(one)
    for one in unknown:
        one.notes.append(Note("not on the roster", Kind.NOT_LISTED))
    return [str(each) for each in left]


def _by_number(listed: Listed, one: Submission) -> bool:
    return one.account is not None and listed.number == one.account.number


def _by_name(listed: Listed, one: Submission) -> bool:
    return bool(listed.name) and listed.name == one_line(one.student)
