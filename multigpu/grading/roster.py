"""Who is in the class: `--roster FILE`.

A CSV file with a header: your own with the column `student`, Canvas's export of its gradebook
(`Student`, `ID`), or Moodle's grading worksheet (`Identifier`, `Full name`). A student is
found by the platform's number, or by the key in gradebook.csv.
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from multigpu.errors import UserError
from multigpu.grading.results import Kind, Note
from multigpu.grading.submissions import Submission
from multigpu.grading.texts import one_line

# Where a comma separates decimals, spreadsheets write semicolons between cells.
DELIMITERS = ",;\t"


class Listed(NamedTuple):
    """A row: the name, and the platform's number, "" if the file has none."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name} ({self.number})".strip() if self.number else self.name


def read(path: Path) -> list[Listed]:
    """The students. Raises UserError if the file cannot be read, or names one twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        header = text.partition("\n")[0]
        delimiter = max(DELIMITERS, key=header.count)
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{path} is no CSV file in UTF-8: save it as 'CSV UTF-8'.") from None
    columns = [name.strip().lower() for name in rows[0]] if rows else []
    if "student" not in columns and "full name" not in columns:
        raise UserError(
            f"{path}: the first line is {header.strip()[:80]!r}: expected the column student."
        )
    lines: dict[Listed, int] = {}
    for line, row in enumerate(rows[1:], 2):
        cells = dict(zip(columns, map(one_line, row), strict=False))
        number = cells.get("id") or cells.get("identifier", "")
        name = cells.get("student") or cells.get("full name", "")
        listed = Listed(name, number.removeprefix("Participant "))
        # Canvas's second row has the most points.
        if not any(listed) or listed.name == "Points Possible":
            continue
        if listed in lines:
            raise UserError(
                f"{path}, line {line}: {listed} is in line {lines[listed]}, too: remove one "
                "of them."
            )
        lines[listed] = line
    return list(lines)


def compare(roster: Iterable[Listed], submissions: Iterable[Submission]) -> list[str]:
    """The students who have handed in nothing; those not on the roster get a note."""
    left = list(roster)
    unknown = list(submissions)
    # All numbers come before all names: another student may have the same name.
    for is_of in (_by_number, _by_name):
        for submission in list(unknown):
            mine = next((listed for listed in left if is_of(listed, submission)), None)
            if mine is not None:
                left.remove(mine)
                unknown.remove(submission)
    for submission in unknown:
        submission.notes.append(Note("not on the roster", Kind.NOT_LISTED))
    return [str(listed) for listed in left]


def _by_number(listed: Listed, submission: Submission) -> bool:
    return submission.account is not None and listed.number == submission.account.number


def _by_name(listed: Listed, submission: Submission) -> bool:
    return bool(listed.name) and listed.name == one_line(submission.student)
