"""What the command prints after grading: what an instructor must look at, and the mean."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from multigpu.errors import pluralize
from multigpu.grading.csv_cells import number
from multigpu.grading.results import Kind, Result

NAMED = 10
HEADINGS = {
    Kind.NO_ANSWER: "without any answer cell of this lesson",
    Kind.FILES: "several files by one student",
    Kind.NOT_LISTED: "not on the roster",
}


def lines(
    results: Sequence[Result], nobodys: Sequence[str], absent: Sequence[str], folder: Path
) -> list[str]:
    """The summary, in lines. `nobodys` are notes on files that are no submission's."""
    found = _cut(list(nobodys))
    if absent:
        found += [f"handed in nothing: {len(absent)}", *_cut([f"    {one}" for one in absent])]
    problems = [one for one in results if one.problem]
    heading = "not graded, ask for the notebook again"
    found += _listed(heading, [(one, one.problem) for one in problems])
    for kind, heading in HEADINGS.items():
        said = [(one, note.text) for one in results for note in one.notes if note.kind == kind]
        found += _listed(heading, said)
    blocked = [(one, "") for one in results if one.blocked]
    found += _listed("blocked, this machine could not grade them: grade again", blocked)
    points = results[0].points if results else 0
    known = [one.earned for one in results if not one.problem and not one.blocked]
    mean = number(statistics.mean(known)) if known else "-"
    found.append(
        f"{pluralize(len(results), 'submission')}, mean {mean} of {number(points)} points"
        f"{_left_out(problems)}: {folder / 'gradebook.csv'}"
    )
    return found


def _left_out(problems: Sequence[Result]) -> str:
    return f" ({pluralize(len(problems), 'file')} not graded, left out)" if problems else ""


def _listed(heading: str, said: Sequence[tuple[Result, str]]) -> list[str]:
    """A heading with a count, and a line per student with what is said of the submission."""
    lines = [f"    {one.student}{text and f': {text}'}" for one, text in said]
    return [f"{heading}: {len(said)}", *_cut(lines)] if said else []


def _cut(said: list[str]) -> list[str]:
    if len(said) <= NAMED:
        return said
    return [*said[:NAMED], f"    and {len(said) - NAMED} more"]
