"""How the questions did: counts and means.

Files that could not be graded are left out.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from multigpu.errors import pluralize
from multigpu.grading.csv_cells import number
from multigpu.grading.results import PartResult, Result
from multigpu.grading.texts import visible

STATUSES = ("right", "wrong", "blank", "blocked")


@dataclass(frozen=True)
class Row:
    """A question, or a check of it.

    check    its title; "" for the whole question
    counts   of students by status: a question is right if all its checks are, and blocked if
             one is
    mean     mean share of the points, from 0 to 1, blocked ones left out
    """

    question: str
    check: str
    points: float
    counts: Counter[str]
    mean: float | None


def rows(results: Sequence[Result]) -> Iterator[Row]:
    """A row per question, and one per check after it."""
    results = [one for one in results if not one.problem]
    for place, question in enumerate(results[0].questions if results else ()):
        yield _row(results, place, slice(None), "")
        for check, part in enumerate(question.parts):
            title = f"hidden: {part.title}" if part.hidden else part.title
            yield _row(results, place, slice(check, check + 1), title)


def _row(results: Sequence[Result], place: int, checks: slice, title: str) -> Row:
    """The row of these checks of the question at this place."""
    counts: Counter[str] = Counter()
    shares = []
    for one in results:
        question = one.questions[place]
        chosen = question.parts[checks]
        points = sum(part.points for part in chosen)
        status = _status(question.blank, chosen)
        counts[status] += 1
        if status != "blocked":
            earned = sum(part.earned for part in chosen)
            shares.append(earned / points)
    mean = statistics.mean(shares) if shares else None
    return Row(question.name, title, points, counts, mean)


def _status(blank: bool, parts: Sequence[PartResult]) -> str:
    statuses = {part.status for part in parts}
    if "blocked" in statuses:
        return "blocked"
    if blank:
        return "blank"
    return "wrong" if "wrong" in statuses else "right"


def mean_total(results: Sequence[Result]) -> float | None:
    """The mean of the totals of all files that could be graded; blocked ones are left out."""
    known = [one.earned for one in results if not one.problem and not one.blocked]
    return statistics.mean(known) if known else None


def text(results: Sequence[Result]) -> str:
    """The rows as a table of at most 95 columns."""
    points = results[0].points if results else 0
    unread = sum(bool(one.problem) for one in results)
    lines = [
        f"{pluralize(len(results) - unread, 'student')}; left out, as they could not be "
        f"graded: {pluralize(unread, 'file')}",
        f"mean total: {number(mean_total(results)) or '-'} of {number(points)} points",
        "",
        f"{'question / check':<42}{'points':>7}{'right':>6}{'wrong':>6}{'blank':>6}"
        f"{'blocked':>8}{'mean':>6}",
    ]
    for row in rows(results):
        name = visible(f"  {row.check}" if row.check else row.question)
        if len(name) > 41:
            name = name[:40] + "…"
        right, wrong, blank, blocked = (row.counts[status] for status in STATUSES)
        mean = "-" if row.mean is None else f"{row.mean:.0%}"
        lines.append(
            f"{name:<42}{row.points:>7g}{right:>6}{wrong:>6}{blank:>6}{blocked:>8}{mean:>6}"
        )
    return "\n".join(lines) + "\n"
