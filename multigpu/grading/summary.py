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
    summary = _cut(list(nobodys))
    if absent:
        summary += [
            f"handed in nothing: {len(absent)}",
            *_cut([f"    {student}" for student in absent]),
        ]
    problems = [result for result in results if result.problem]
    heading = "not graded, ask for the notebook again"
    summary += _listed(heading, [(result, result.problem) for result in problems])
    for kind, heading in HEADINGS.items():
        said = [
            (result, note.text)
            for result in results
            for note in result.notes
            if note.kind == kind
        ]
        summary += _listed(heading, said)
    blocked = [(result, "") for result in results if result.blocked]
    summary += _listed("blocked, this machine could not grade them: grade again", blocked)
    points = results[0].points if results else 0
    known = [result.earned for result in results if not result.problem and not result.blocked]
    mean = number(statistics.mean(known)) if known else "-"
    left_out = (
        f" ({pluralize(len(problems), 'file')} not graded, left out)" if problems else ""
    )
    summary.append(
        f"{pluralize(len(results), 'submission')}, mean {mean} of {number(points)} points"
        f"{left_out}: {folder / 'gradebook.csv'}"
    )
    return summary


def _listed(heading: str, said: Sequence[tuple[Result, str]]) -> list[str]:
    """A heading with a count, and a line per student with what is said of the submission."""
    lines = [f"    {result.student}{text and f': {text}'}" for result, text in said]
    return [f"{heading}: {len(said)}", *_cut(lines)] if said else []


def _cut(said: list[str]) -> list[str]:
    if len(said) <= NAMED:
        return said
    return [*said[:NAMED], f"    and {len(said) - NAMED} more"]
