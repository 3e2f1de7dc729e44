"""A whole grading, from what was handed in to all reports.

DIR holds the reports (reports.py) and, for the next run of the command:

outcomes/         what each set of answers gave; delete it to run all of them again
secret.txt        what the hidden checks' seeds and the pseudonyms are made of
overrides.csv     or .json: points by hand, as given with --override
late.txt          the rule, as given with --late
times.csv         or .json: when students handed in, as given with --times
lesson.txt        whose results these are
marks.json        the marks under the students' own names
pseudonyms.csv    which pseudonym is whose
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multigpu import sandbox
from multigpu.course import LESSONS
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.grading import (
    grade,
    late,
    marking,
    overrides,
    pseudonyms,
    regrade,
    reports,
    submissions,
    summary,
    times,
)
from multigpu.grading.marking import Outcome
from multigpu.grading.marks import Marked, mark
from multigpu.grading.results import Result
from multigpu.grading.solution import Solution, find
from multigpu.grading.submissions import Submission
from multigpu.grading.transplant import Answers

MARKS = "marks.json"
LATE = "late.txt"
LESSON = "lesson.txt"
PSEUDONYMS = "pseudonyms.csv"
SUFFIXES = (".csv", ".json")


@dataclass(frozen=True)
class Options:
    """What the command was given.

    solutions   an instructor's own; None for the course's
    override    a file of points by hand; None for that of the last run, if there was one
    times       a file of hand-in times; None for that of the last run
    late        a rule; None for that of the last run; "none" for no rule any more
    assignment  the column's name in Canvas; "" for the lesson's title
    """

    lesson: str
    handed_in: Path
    output: Path
    sandbox: str | None
    jobs: int
    solutions: Path | None = None
    override: Path | None = None
    late: str | None = None
    assignment: str = ""
    pseudonyms: bool = False
    regrade: bool = False
    times: Path | None = None


def run(options: Options, progress: Callable[[int, int], None]) -> list[str]:
    """Grade and write all reports. Returns what is to be said, in lines.

    Raises UserError; then no report has changed.
    """
    folder = options.output
    solution = find(options.lesson, options.solutions)
    _check_folder(folder, solution.lesson)
    _check_hidden(options)
    rule = _rule(options)
    before = _before(options)
    found = submissions.find(options.handed_in, solution.lesson)
    nobodys = found.notes + _give_times(options, found.submissions)
    given = _overrides(options, solution, found.submissions)
    nobodys += overrides.nobodys(given, [one.student for one in found.submissions])
    try:
        settings = grade.Settings(folder, options.sandbox, options.jobs)
        results = grade.grade(solution, found.submissions, settings, progress)
        marks = mark(results, given, rule)
        secret = grade.read_secret(folder).encode()
        shown = pseudonyms.pseudonymized(marks, secret) if options.pseudonyms else marks
        released = {each.name: solution.released_answer(each) for each in solution.questions}
        title = next(each.title for each in LESSONS if each.slug == solution.lesson)
        reports.write(shown, folder, solution.lesson, title, released, options.assignment)
        reports.write_results(marks, folder / MARKS)
        if options.pseudonyms:
            table = pseudonyms.key_table([one.student for one in marks], secret)
            with atomic(folder / PSEUDONYMS) as temporary:
                temporary.write_text(table, encoding="utf-8", newline="")
        _keep(options, solution.lesson)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}.") from None
    changes = regrade.text(regrade.changes(before, marks)).splitlines() if before else []
    return [*summary.lines(marks, nobodys, folder), *changes]


def _before(options: Options) -> list[Marked] | None:
    """The marks of the last run, if they are asked for. Raises UserError."""
    if not options.regrade:
        return None
    path = options.output / MARKS
    if not path.exists():
        raise UserError(f"{options.output} holds no marks yet: grade without --regrade first.")
    return reports.read_results(path)


def _rule(options: Options) -> late.Rule | None:
    """The rule for late submissions. Raises UserError."""
    kept = options.output / LATE
    text = options.late
    if text is None and kept.exists():
        text = kept.read_text(encoding="utf-8").strip()
    return late.parse(text) if text and text != "none" else None


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
    """Raise UserError if students' code could read the submissions or your own solutions."""
    for path in filter(None, (options.handed_in, options.solutions)):
        if options.sandbox and sandbox.shows(path):
            raise UserError(
                f"students' code could read {path}, which is in a folder of Python's: copy it "
                f"to another folder."
            )


def _give_times(options: Options, handed_in: list[Submission]) -> list[str]:
    """Set the times of --times, or of the last run's. Returns notes. Raises UserError."""
    path = options.times or _kept(options.output, "times")
    if path is None:
        return []
    left = times.apply(times.read(path), handed_in)
    if not left:
        return []
    return [f"{path} has times of students without a submission: {', '.join(left[:5])}"]


def _kept(folder: Path, name: str) -> Path | None:
    """The file NAME.csv or NAME.json that an earlier run has kept."""
    paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
    return next((path for path in paths if path.exists()), None)


def _overrides(
    options: Options, solution: Solution, handed_in: list[Submission]
) -> list[overrides.Override]:
    """The points by hand. Raises UserError."""
    path = options.override or _kept(options.output, "overrides")
    if path is None:
        return []
    # Read before anything is graded: only the names of questions and checks count.
    blank = marking.question_results(solution, Answers(), Outcome(), ())
    return overrides.read(path, [Result(one.student, one.file, blank) for one in handed_in])


def _keep(options: Options, lesson: str) -> None:
    """Keep the lesson, the rule, the times and the points by hand for the next run."""
    with atomic(options.output / LESSON) as temporary:
        temporary.write_text(lesson + "\n", encoding="utf-8")
    if options.late is not None:
        with atomic(options.output / LATE) as temporary:
            temporary.write_text(options.late + "\n", encoding="utf-8")
    _keep_file(options.override, options.output, "overrides")
    _keep_file(options.times, options.output, "times")


def _keep_file(given: Path | None, folder: Path, name: str) -> None:
    """Copy a file that was given to NAME.csv or NAME.json, and remove the other of the two."""
    if given is None:
        return
    target = folder / (f"{name}.json" if given.suffix.lower() == ".json" else f"{name}.csv")
    if given.resolve() != target.resolve():
        with atomic(target) as temporary:
            shutil.copyfile(given, temporary)
    for suffix in SUFFIXES:
        if suffix != target.suffix:
            (folder / f"{name}{suffix}").unlink(missing_ok=True)
