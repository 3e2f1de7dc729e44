"""How the questions did: counts, mean, and how well a question separates the students.

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

MIN_STUDENTS = 3
STATUSES = ("right", "wrong", "blank", "blocked")


@dataclass(frozen=True)
class Row:
    """A question, or a check of it.

    check           its title; "" for the whole question
    counts          of students by status: a question is right if all its checks are, and
                    blocked if one is
    mean            mean share of the points, from 0 to 1, blocked ones left out
    discrimination  from -1 to 1; None if it is not defined
    """

    question: str
    check: str
    points: float
    counts: Counter[str]
    mean: float | None
    discrimination: float | None


def rows(results: Sequence[Result]) -> Iterator[Row]:
    """A row per question, and one per check after it.

    discrimination is the correlation of the points for it with the points for the rest of the
    same student's work: the item-rest correlation (S. Henrysson, Correction of item-total
    correlations in item analysis, Psychometrika 28, 1963). Below 0.2, look at the question (a
    common rule of thumb); below 0, better students get it wrong. It is not defined for fewer
    than three students, or if all have the same.
    """
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
    rests = []
    for one in results:
        question = one.questions[place]
        chosen = question.parts[checks]
        points = sum(part.points for part in chosen)
        status = _status(question.blank, chosen)
        counts[status] += 1
        if status != "blocked":
            earned = sum(part.earned for part in chosen)
            shares.append(earned / points)
            if not one.blocked:
                rests.append((earned, one.earned - earned))
    mean = statistics.mean(shares) if shares else None
    return Row(question.name, title, points, counts, mean, correlation(rests))


def _status(blank: bool, parts: Sequence[PartResult]) -> str:
    statuses = {part.status for part in parts}
    if "blocked" in statuses:
        return "blocked"
    if blank:
        return "blank"
    return "wrong" if "wrong" in statuses else "right"


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r of the pairs; None if there are fewer than three, or a side is constant."""
    if len(pairs) < MIN_STUDENTS:
        return None
    try:
        return statistics.correlation(*zip(*pairs, strict=True))
    except statistics.StatisticsError:  # a side is constant
        return None


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
        "discrim.: how well it separates strong from weak students, from -1 to 1. Below 0.2, "
        "look at",
        "the question; below 0, students who do well elsewhere get it wrong.",
        "",
        f"{'question / check':<42}{'points':>7}{'right':>6}{'wrong':>6}{'blank':>6}"
        f"{'blocked':>8}{'mean':>6}{'discrim.':>9}",
    ]
    for row in rows(results):
        name = visible(f"  {row.check}" if row.check else row.question)
        if len(name) > 41:
            name = name[:40] + "…"
        right, wrong, blank, blocked = (row.counts[status] for status in STATUSES)
        mean = "-" if row.mean is None else f"{row.mean:.0%}"
        discrimination = "-" if row.discrimination is None else f"{row.discrimination:+.2f}"
        lines.append(
            f"{name:<42}{row.points:>7g}{right:>6}{wrong:>6}{blank:>6}{blocked:>8}"
            f"{mean:>6}{discrimination:>9}"
        )
    return "\n".join(lines) + "\n"
