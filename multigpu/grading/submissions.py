"""What students handed in: which of a student's files counts, and what is to be said of it.

A student who handed in something that cannot be read has a submission with a `problem`.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from multigpu.errors import UserError
from multigpu.grading import platforms, sources
from multigpu.grading.platforms import HandedIn, is_notebook
from multigpu.grading.results import Account, Kind, Note

NAMED = 5
MAX_TOTAL = 2 << 30  # bytes of all notebooks that are read


@dataclass
class Submission:
    """One student's file; its fields are those of Result.

    data   its bytes, at most transplant.MAX_BYTES + 1
    """

    student: str
    file: str
    data: bytes = b""
    account: Account | None = None
    problem: str = ""
    notes: list[Note] = field(default_factory=list)


@dataclass
class Submissions:
    """One submission per student, sorted by student, and notes on what is nobody's."""

    submissions: list[Submission]
    notes: list[str] = field(default_factory=list)


def find(path: Path, lesson: str) -> Submissions:
    """Read what students handed in: a folder or a zip in a form that platforms.py knows.

    If a student has several notebooks, one counts: the notebook with the lesson's name.
    Without such a name, the newest counts, by the platform's number, then by the file's time.
    Raises UserError if there is no submission, and if all together exceed the limit.
    """
    with sources.opened(path) as (files, notes):
        handed_in, ignored = platforms.whose(files, path)
        by_student: dict[str, list[HandedIn]] = {}
        for entry in handed_in:
            by_student.setdefault(entry.student, []).append(entry)
        chosen = {student: choose(entries, lesson) for student, entries in by_student.items()}
        if not any(is_notebook(entry.name) for entry in handed_in):
            raise UserError(
                f"{path} has no notebook: expected STUDENT.ipynb, STUDENT/NAME.ipynb, or a "
                f"zip from Canvas or Moodle."
            )
        total = sum(min(entry.file.size, sources.MAX_READ) for entry in chosen.values())
        if total > MAX_TOTAL:
            raise UserError(
                f"the notebooks in {path} have {total:,} bytes, more than {MAX_TOTAL:,}: "
                f"grade them in two parts."
            )
        submissions = []
        for student in sorted(chosen, key=lambda name: (name.casefold(), name)):
            counted = chosen[student]
            submissions.append(_read(counted, by_student[student]))
        doubles = _refuse_doubles(submissions)
    return Submissions(submissions, notes + ignored + doubles)


def find_one(path: Path, lesson: str) -> Submissions:
    """Read a folder that has the files of one student: Gradescope's."""
    with sources.opened(path) as (files, notes):
        handed_in = [HandedIn("submission", file.path, file) for file in files]
        if not handed_in:
            return Submissions(
                [Submission("submission", "", problem="no notebook was handed in")]
            )
        return Submissions([_read(choose(handed_in, lesson), handed_in)], notes)


def choose(handed_in: list[HandedIn], lesson: str) -> HandedIn:
    """Which of one student's files counts."""

    def rank(entry: HandedIn) -> tuple:
        readable = (
            is_notebook(entry.name),
            not entry.file.problem,
            _is_named(entry.name, lesson),
        )
        return (*readable, entry.upload, entry.file.modified, entry.file.parts)

    return max(handed_in, key=rank)


def _is_named(name: str, lesson: str) -> bool:
    """Whether a file, or a folder of it, is named like the lesson.

    -1 and (1) are of platforms and browsers.
    """
    *folders, last = name.split("/")
    stem = re.sub(r"(-\d+| ?\(\d+\))+$", "", last.removesuffix(".ipynb"))
    return lesson in (stem, *folders)


def _read(counted: HandedIn, handed_in: list[HandedIn]) -> Submission:
    submission = Submission(counted.student, counted.file.path, account=counted.account)
    others = [other for other in handed_in if other is not counted]
    if is_notebook(counted.name):
        submission.data, submission.problem = counted.file.read()
        notebooks = sorted(other.name for other in others if is_notebook(other.name))
        if notebooks:
            listed = _listed(notebooks)
            text = f"{counted.name} was graded; also handed in, and left out: {listed}"
            submission.notes.append(Note(text, Kind.FILES))
    else:
        names = sorted(other.name for other in handed_in)
        submission.problem = f"no notebook was handed in, only {_listed(names)}"
    return submission


def _refuse_doubles(submissions: list[Submission]) -> list[str]:
    """Give a problem to those who have one account: nobody gets another student's points.

    Returns notes with their names, which the students do not see.
    """
    notes = []
    by_account: dict[Account, list[Submission]] = {}
    for submission in submissions:
        if submission.account is not None:
            by_account.setdefault(submission.account, []).append(submission)
    for account, sharing in by_account.items():
        if len(sharing) == 1:
            continue
        number = f"{account.platform}'s number {account.number}"
        for submission in sharing:
            submission.data = b""
            submission.problem = f"another submission has {number}, too"
        students = [submission.student for submission in sharing]
        notes.append(f"{number} is that of {_listed(students)}")
    return notes


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
