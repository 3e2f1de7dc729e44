"""How the questions did: counts, mean, and how well a question separates the students.

Files that could not be graded are left out.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from multigpu.errors import pluralize
from multigpu.grading.csv_cells import number
from multigpu.grading.results import QuestionResult, Result
from multigpu.grading.texts import visible

MIN_STUDENTS = 3


@dataclass(frozen=True)
class Row:
    """A question, or a check of it.

    check           its title; "" for the whole question
    right … blocked students: a question is right if all its checks are, and blocked if one is
    mean            mean share of the points, from 0 to 1, blocked ones left out
    discrimination  from -1 to 1; None if it is not defined
    """

    question: str
    check: str
    hidden: bool
    points: float
    right: int
    wrong: int
    blank: int
    blocked: int
    mean: float | None
    discrimination: float | None


def rows(results: Sequence[Result]) -> list[Row]:
    """A row per question, and one per check after it.

    discrimination is the correlation of the points for it with the points for the rest of the
    same student's work: the item-rest correlation (S. Henrysson, Correction of item-total
    correlations in item analysis, Psychometrika 28, 1963). Below 0.2, look at the question (a
    common rule of thumb); below 0, better students get it wrong. It is not defined for fewer
    than three students, or if all have the same.
    """
    results = [one for one in results if not one.problem]
    found = []
    count = len(results[0].questions) if results else 0
    for place in range(count):
        questions = [one.questions[place] for one in results]
        found.append(_row(results, None, questions))
        for place_of_check in range(min(len(question.parts) for question in questions)):
            found.append(_row(results, place_of_check, questions))
    return found


def _row(
    results: Sequence[Result], check: int | None, questions: Sequence[QuestionResult]
) -> Row:
    """The row of a question; with a check, of the check at this place."""
    first = questions[0]
    counts = {"right": 0, "wrong": 0, "blank": 0, "blocked": 0}
    shares = []
    rests = []
    for one, question in zip(results, questions, strict=True):
        parts = question.parts
        chosen = parts if check is None else [parts[check]]
        status = _status(question.blank, [part.status for part in chosen])
        counts[status] += 1
        points = sum(part.points for part in chosen)
        if status != "blocked" and not one.blocked:
            earned = sum(part.earned for part in chosen)
            rests.append((earned, one.earned - earned))
        if status != "blocked" and points:
            shares.append(sum(part.earned for part in chosen) / points)
    part = None if check is None else first.parts[check]
    return Row(
        first.name,
        part.title if part else "",
        part.hidden if part else False,
        part.points if part else first.points,
        **counts,
        mean=sum(shares) / len(shares) if shares else None,
        discrimination=correlation(rests),
    )


def _status(blank: bool, statuses: list[str]) -> str:
    if "blocked" in statuses:
        return "blocked"
    if blank:
        return "blank"
    return "right" if all(status == "right" for status in statuses) else "wrong"


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
    totals = [one.earned for one in results if not one.problem]
    known = [total for total in totals if total is not None]
    return sum(known) / len(known) if known else None


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
        name = (
            f"  {row.check}{' (hidden)' if row.hidden else ''}" if row.check else row.question
        )
        name = visible(name)
        if len(name) > 41:
            name = name[:40] + "…"
        mean = "-" if row.mean is None else f"{row.mean:.0%}"
        discrimination = "-" if row.discrimination is None else f"{row.discrimination:+.2f}"
        lines.append(
            f"{name:<42}{row.points:>7g}{row.right:>6}{row.wrong:>6}{row.blank:>6}"
            f"{row.blocked:>8}{mean:>6}{discrimination:>9}"
        )
    return "\n".join(lines) + "\n"
