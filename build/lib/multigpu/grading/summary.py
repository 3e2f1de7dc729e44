"""What the command prints after grading: what an instructor must look at, and the mean."""

from collections.abc import Sequence
from pathlib import Path

from multigpu.errors import pluralize
from multigpu.grading.csv_cells import number
from multigpu.grading.marks import Marked
from multigpu.grading.question_statistics import mean_total
from multigpu.grading.submissions import ALSO_HANDED_IN, LATE_MARK
from multigpu.grading.transplant import NO_ANSWER_CELL, OTHER_LESSON

NAMED = 10


def lines(marks: Sequence[Marked], nobodys: Sequence[str], folder: Path) -> list[str]:
    """The summary, in lines.

    nobodys   notes that belong to no submission, such as on files that were ignored
    folder    where the reports are
    """
    found = _cut(list(nobodys))
    problems = [one for one in marks if one.result.problem]
    other = [one for one in problems if OTHER_LESSON in one.result.problem]
    found += _listed("another lesson's notebook", other, problem=True)
    unreadable = [one for one in problems if one not in other]
    found += _listed("not readable, ask for it again", unreadable, problem=True)
    for heading, words in (
        ("without any answer cell of this lesson", NO_ANSWER_CELL),
        ("several files by one student", ALSO_HANDED_IN),
    ):
        found += _listed(heading, [one for one in marks if _note(one, words)], words)
    late = [one for one in marks if _note(one, LATE_MARK) and not one.result.submitted]
    found += _listed("marked late by Canvas, without a time: give --times", late)
    timeless = [one for one in marks if one.penalty and not one.result.submitted]
    if timeless:
        found.append(
            f"{len(timeless)} of {pluralize(len(marks), 'submission')} without a hand-in "
            f"time: nothing is taken off; --times gives the times"
        )
    blocked = [one for one in marks if one.blocked]
    found += _listed("blocked, this machine could not grade them: grade again", blocked)
    points = marks[0].points if marks else 0
    found.append(
        f"{pluralize(len(marks), 'submission')}, mean {number(mean_total(marks)) or '-'} of "
        f"{number(points)} points{_left_out(problems)}: {folder / 'gradebook.csv'}"
    )
    return found


def _left_out(problems: Sequence[Marked]) -> str:
    return f" ({pluralize(len(problems), 'file')} not graded, left out)" if problems else ""


def _listed(
    heading: str, marks: Sequence[Marked], words: str = "", problem: bool = False
) -> list[str]:
    """A heading with a count, and a line per student with the note that has these words."""
    if not marks:
        return []
    said = []
    for one in marks:
        text = one.result.problem if problem else _note(one, words) if words else ""
        said.append(f"    {one.student}: {text}" if text else f"    {one.student}")
    return [f"{heading}: {len(marks)}", *_cut(said)]


def _note(one: Marked, words: str) -> str:
    return next((note for note in one.result.notes if words in note), "")


def _cut(said: list[str]) -> list[str]:
    if len(said) <= NAMED:
        return said
    return [*said[:NAMED], f"    and {len(said) - NAMED} more"]
