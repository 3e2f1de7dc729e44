"""The gradebook: for the instructor, and in the forms that Canvas and Moodle import.

A blocked student has an empty cell in each form, never 0. In the forms for Canvas and Moodle,
a student whose file could not be graded has an empty cell too, because they would show the 0
to the student. Canvas and Moodle find a student by the number of the account, which
submissions.find() reads in their own zips; without one, the key counts as a login.
"""

from collections.abc import Sequence

from multigpu.grading.csv_cells import table
from multigpu.grading.results import Result


def gradebook(results: Sequence[Result], absent: Sequence[str] = ()) -> str:
    """CSV: student, points per question, total, out of, status, notes.

    status is `graded`, `blocked` (the machine could not grade it), `not readable` (the file
    is no notebook: 0 points), or `nothing handed in` for the students of `absent`.
    """
    names = [question.name for question in results[0].questions] if results else []
    rows: list[list[str | float | None]] = [
        ["student", *names, "total", "out of", "status", "notes"]
    ]
    for result in results:
        points = [
            *(question.earned for question in result.questions),
            result.earned,
            result.points,
        ]
        said = filter(None, [result.problem, *(note.text for note in result.notes)])
        rows.append([result.student, *points, status(result), "; ".join(said)])
    for student in absent:
        rows.append([student, *[""] * len(names), "", "", "nothing handed in", ""])
    return table(rows)


def status(result: Result) -> str:
    if result.blocked:
        return "blocked"
    return "not readable" if result.problem else "graded"


def published(result: Result) -> float | None:
    """The total for a platform; None if the file was not graded."""
    return None if result.problem else result.earned


def canvas(results: Sequence[Result], assignment: str) -> str:
    """CSV for Canvas: Grades > Import.

    `assignment` is the column's name in Canvas's own export, which ends with the assignment's
    number: `05 DDP (4711)`. The columns are those that canvas-lms, lib/gradebook_importer.rb,
    needs. Canvas compares the ID, then the login, then the name. The second row is the most
    that can be earned.
    """
    rows: list[list[str | float | None]] = [
        ["Student", "ID", "SIS Login ID", "Section", assignment],
        ["    Points Possible", "", "", "", results[0].points if results else 0],
    ]
    for result in results:
        number = _number(result, "Canvas")
        # A student of this name would become the row of the points.
        name = _name(result).replace("Points Possible", "Points_Possible")
        login = "" if number else result.student
        rows.append([name, number, login, "", published(result)])
    return table(rows)


def moodle(results: Sequence[Result]) -> str:
    """CSV for Moodle: the assignment's `Upload grading worksheet`, or Grades > Import > CSV.

    The worksheet needs Identifier, Grade and Last modified (grade), in English
    (mod/assign/feedback/offline/importgradeslib.php); Moodle skips a row with an empty grade.
    If Moodle has a grade already, "Allow updating records that have been modified more
    recently" must be ticked. Grades > Import maps Username.
    """
    rows: list[list[str | float | None]] = [
        ["Identifier", "Full name", "Username", "Grade", "Last modified (grade)"]
    ]
    for result in results:
        number = _number(result, "Moodle")
        identifier = f"Participant {number}" if number else ""
        name = _name(result) if number else ""
        login = "" if number else result.student
        rows.append([identifier, name, login, published(result), ""])
    return table(rows)


def _number(result: Result, platform: str) -> str:
    """The student's number on the platform; "" if the file is not from there."""
    return (
        result.account.number if result.account and result.account.platform == platform else ""
    )


def _name(result: Result) -> str:
    """The student's key without the account, which the key of a platform's file ends with."""
    if result.account is None:
        return result.student
    return result.student.removesuffix(f" ({result.account.platform} {result.account.number})")
