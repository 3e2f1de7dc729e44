"""A whole grading, from what was handed in to all reports."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multigpu.course import LESSONS
from multigpu.errors import UserError
from multigpu.files import atomic, write_json
from multigpu.grading import grade, gradescope, regrade, reports, roster, submissions, summary
from multigpu.grading.pool import Pool
from multigpu.grading.results import Result
from multigpu.grading.solution import find
from multigpu.launch import sandbox

LESSON = "lesson.txt"


@dataclass(frozen=True)
class Options:
    """What the command was given; `sandbox` is the path of bubblewrap, None to run without."""

    lesson: str
    handed_in: Path
    output: Path
    sandbox: str | None
    jobs: int
    solutions: Path | None = None
    roster: Path | None = None
    assignment: str = ""
    regrade: bool = False
    gradescope: Path | None = None


def run(options: Options, progress: Callable[[int, int], None]) -> list[str]:
    """Grade and write all reports. Returns what is to be said, in lines.

    Raises UserError; then no report has changed.
    """
    folder = options.output
    solution = find(options.lesson, options.solutions)
    _check_folder(folder, solution.lesson)
    _check_hidden(options)
    before = _before(options)
    listed = roster.read(options.roster) if options.roster else []
    if options.gradescope:
        handed_in = submissions.find_one(options.handed_in, solution.lesson)
    else:
        handed_in = submissions.find(options.handed_in, solution.lesson)
    absent = roster.compare(listed, handed_in.submissions) if options.roster else []
    try:
        with Pool(options.jobs, solution.seconds) as pool:
            results = grade.grade(
                solution, handed_in.submissions, folder, options.sandbox, pool, progress
            )
        title = next(lesson.title for lesson in LESSONS if lesson.slug == solution.lesson)
        column = options.assignment or title
        secret = grade.read_secret(folder)
        reports.write(results, absent, folder, solution.lesson, title, column, secret)
        with atomic(folder / LESSON) as temporary:
            temporary.write_text(solution.lesson + "\n", encoding="utf-8")
        if options.gradescope:
            write_json(options.gradescope, gradescope.results(results[0]))
    except OSError as error:
        raise UserError(
            f"cannot write to {error.filename or folder}: {error.strerror}."
        ) from None
    changes = regrade.lines(before, results) if before is not None else []
    return [*summary.lines(results, handed_in.notes, absent, folder), *changes]


def _before(options: Options) -> list[Result] | None:
    """The results of the last run, if they are asked for. Raises UserError."""
    if not options.regrade:
        return None
    path = options.output / reports.RESULTS
    if not path.exists():
        raise UserError(f"{options.output} holds no marks yet: grade without --regrade first.")
    return reports.read_results(path)


def _check_folder(folder: Path, lesson: str) -> None:
    """Raise UserError if the folder holds results of another lesson."""
    try:
        other = (folder / LESSON).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{folder / LESSON} cannot be read: {error.strerror}.") from None
    if other != lesson:
        raise UserError(
            f"{folder} holds the results of {other}: give another folder for "
            f"{lesson}, such as -o {folder.parent / lesson}."
        )


def _check_hidden(options: Options) -> None:
    """Raise UserError if students' code could read what is theirs, or yours."""
    for path in filter(None, (options.handed_in, options.solutions, options.output)):
        if options.sandbox and sandbox.shows(path):
            raise UserError(
                f"students' code could read {path}, which is in a folder of Python's: copy it "
                f"to another folder."
            )
