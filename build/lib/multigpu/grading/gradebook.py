"""The gradebook: for the instructor, and in the forms that Canvas and Moodle import.

A blocked student has an empty cell in each form, never 0. In the forms for Canvas and Moodle,
a student whose file could not be graded has an empty cell too, because they would show the 0
to the student. Canvas and Moodle find a student by the number in the key, `Jane Doe (Moodle
12345)`, which submissions.find() makes from their own zips; another key counts as a login.
"""

from collections.abc import Sequence

from multigpu.grading.csv_cells import table
from multigpu.grading.marks import Marked
from multigpu.grading.platforms import CANVAS_KEY, MOODLE_KEY


def gradebook(marks: Sequence[Marked]) -> str:
    """CSV: student, points per question, late penalty, total, out of, status, notes.

    status is `graded`, `blocked` (the machine could not grade it) or `not readable` (the file
    is no notebook: 0 points, unless points are given by hand).
    """
    names = [question.measured.name for question in marks[0].questions] if marks else []
    rows: list[list[str | float | None]] = [
        ["student", *names, "late penalty", "total", "out of", "status", "notes"]
    ]
    for one in marks:
        rows.append(
            [
                one.student,
                *(question.earned for question in one.questions),
                one.taken_off,
                one.total,
                one.points,
                status(one),
                notes(one),
            ]
        )
    return table(rows)


def status(one: Marked) -> str:
    """The student's status in one or two words."""
    if one.blocked:
        return "blocked"
    return "not readable" if one.result.problem else "graded"


def notes(one: Marked) -> str:
    """What is to be said about the marks, in one cell."""
    said = [one.result.problem] if one.result.problem else []
    said += one.notes
    for override in one.overrides:
        check = f"/{override.check}" if override.check else ""
        said.append(f"{override.question}{check} by hand: {override.reason}")
    return "; ".join(said)


def published(one: Marked) -> float | None:
    """The total for a platform; None if the file was not graded and nothing is by hand."""
    return None if one.result.problem and not one.overrides else one.total


def canvas(marks: Sequence[Marked], assignment: str) -> str:
    """CSV for Canvas: Grades > Import.

    `assignment` is the column's name in Canvas's own export, which ends with the assignment's
    number: `05 DDP (4711)`. The columns are those that canvas-lms, lib/gradebook_importer.rb,
    needs. Canvas compares the ID, then the login, then the name. The second row is the most
    that can be earned.
    """
    rows: list[list[str | float | None]] = [
        ["Student", "ID", "SIS Login ID", "Section", assignment],
        ["    Points Possible", "", "", "", _most(marks)],
    ]
    for one in marks:
        match = CANVAS_KEY.fullmatch(one.student)
        name = match["name"] if match else one.student
        # A student of this name would become the row of the points.
        name = name.replace("Points Possible", "Points_Possible")
        number = match["id"] if match else ""
        login = "" if match else one.student
        rows.append([name, number, login, "", published(one)])
    return table(rows)


def moodle(marks: Sequence[Marked]) -> str:
    """CSV for Moodle: the assignment's `Upload grading worksheet`, or Grades > Import > CSV.

    The worksheet needs Identifier, Grade and Last modified (grade), in English
    (mod/assign/feedback/offline/importgradeslib.php); Moodle skips a row with an empty grade.
    If Moodle has a grade already, "Allow updating records that have been modified more
    recently" must be ticked. Grades > Import maps Username.
    """
    rows: list[list[str | float | None]] = [
        [
            "Identifier",
            "Full name",
            "Username",
            "Status",
            "Grade",
            "Maximum Grade",
            "Last modified (grade)",
        ]
    ]
    for one in marks:
        match = MOODLE_KEY.fullmatch(one.student)
        identifier = f"Participant {match['id']}" if match else ""
        name = match["name"] if match else ""
        login = "" if match else one.student
        row = [identifier, name, login, status(one), published(one), one.points, ""]
        rows.append(row)
    return table(rows)


def _most(marks: Sequence[Marked]) -> float:
    return max((one.points for one in marks), default=0.0)
