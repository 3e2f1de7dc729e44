"""A whole grading, from what was handed in to all reports.

DIR holds the reports (reports.py) and, for the next run of the command:

outcomes/         what each set of answers gave; delete it to run all of them again
secret.txt        what the hidden checks' seeds and the pseudonyms are made of
overrides.csv     or .json: points by hand, as given with --override
late.txt          the rule, as given with --late
marks.json        the marks under the students' own names
pseudonyms.csv    which pseudonym is whose
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multigpu.course import LESSONS
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.grading import grade, late, overrides, pseudonyms, regrade, reports, submissions
from multigpu.grading.csv_cells import number
from multigpu.grading.marks import Marked, mark
from multigpu.grading.results import Result
from multigpu.grading.solution import find

MARKS = "marks.json"
LATE = "late.txt"
PSEUDONYMS = "pseudonyms.csv"
OVERRIDES = ("overrides.csv", "overrides.json")


@dataclass(frozen=True)
class Options:
    """What the command was given.

    solutions   an instructor's own; None for the course's
    override    a file of points by hand; None for that of the last run, if there was one
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


def run(options: Options, progress: Callable[[int, int], None]) -> list[str]:
    """Grade and write all reports. Returns what is to be said, in lines.

    Raises UserError; then no report has changed.
    """
    folder = options.output
    solution = find(options.lesson, options.solutions)
    rule = _rule(options)
    before = _before(options)
    found = submissions.find(options.handed_in, solution.lesson)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        settings = grade.Settings(folder, options.sandbox, options.jobs)
        results = grade.grade(solution, found.submissions, settings, progress)
        given = _overrides(options, results)
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
        _keep(options)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}.") from None
    changes = regrade.text(regrade.changes(before, marks)).splitlines() if before else []
    return [*found.notes, *_summary(marks, options), *changes]


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


def _overrides(options: Options, results: list[Result]) -> list[overrides.Override]:
    """The points by hand. Raises UserError."""
    kept = [options.output / name for name in OVERRIDES if (options.output / name).exists()]
    path = options.override or next(iter(kept), None)
    return overrides.read(path, results) if path else []


def _keep(options: Options) -> None:
    """Keep the rule and the points by hand for the next run."""
    if options.late is not None:
        with atomic(options.output / LATE) as temporary:
            temporary.write_text(options.late + "\n", encoding="utf-8")
    if options.override is not None:
        target = options.output / f"overrides{options.override.suffix}"
        if options.override.resolve() != target.resolve():
            with atomic(target) as temporary:
                shutil.copyfile(options.override, temporary)
        for name in OVERRIDES:
            if name != target.name:
                (options.output / name).unlink(missing_ok=True)


def _summary(marks: list[Marked], options: Options) -> list[str]:
    totals = [one.total for one in marks if one.total is not None]
    lines = []
    for one in marks:
        if one.blocked:
            lines.append(
                f"{one.student}: blocked, this machine could not grade it: grade again"
            )
        elif one.result.problem:
            lines.append(f"{one.student}: 0, {one.result.problem}")
    mean = sum(totals) / len(totals) if totals else None
    points = marks[0].points if marks else 0
    lines.append(
        f"{len(marks)} submissions, mean {number(mean) or '-'} of {number(points)} points: "
        f"{options.output / 'gradebook.csv'}"
    )
    return lines
