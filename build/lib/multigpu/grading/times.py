"""When students handed in, for platforms whose files do not say it: `--times FILE`.

A CSV file with a header, or a JSON list of objects:

    student,submitted
    doejane (Canvas 12345),2026-11-30T23:12+01:00
"""

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from multigpu.errors import UserError
from multigpu.grading import given_rows
from multigpu.grading.csv_cells import plain
from multigpu.grading.submissions import Submission

COLUMNS = ("student", "submitted")


def read(path: Path) -> dict[str, str]:
    """Each student's time, in ISO 8601 with the zone.

    Raises UserError if the file cannot be read, for a time without a zone, and for two times
    of one student.
    """
    times: dict[str, str] = {}
    for where, row in given_rows.read(path, COLUMNS):
        student = plain(str(row["student"]).strip())
        given = str(row["submitted"] or "").strip()
        try:
            time = datetime.fromisoformat(given)
        except ValueError:
            time = None
        if time is None or time.tzinfo is None:
            raise UserError(
                f"{where}: {given!r} is no time with a zone: expected, for example, "
                f"2026-11-30T23:12+01:00."
            )
        if student in times:
            raise UserError(f"{where}: {student!r} has two times: leave one of them.")
        times[student] = time.isoformat()
    return times


def apply(times: dict[str, str], submissions: Iterable[Submission]) -> list[str]:
    """Set the submissions' times. Returns the students who have a time and no submission."""
    left = dict(times)
    for one in submissions:
        one.submitted = left.pop(one.student, one.submitted)
    return list(left)
