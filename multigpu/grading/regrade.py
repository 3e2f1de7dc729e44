"""What changed between two gradings of the same students, and why."""

from collections.abc import Sequence

from multigpu.grading.csv_cells import number
from multigpu.grading.results import Result
from multigpu.grading.texts import one_line

NO_CHECK = ("-", "")


def lines(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    """A line per check and total whose points are not what they were."""
    old = {result.student: result for result in before}
    changes = []
    for new in after:
        previous = old.pop(new.student, None)
        if previous is None:
            changes.append(f"{new.student}: total: {_points(new.earned)}: a new student")
            continue
        was, now = _checks(previous), _checks(new)
        for check in dict.fromkeys([*now, *was]):
            first, second = was.get(check, NO_CHECK), now.get(check, NO_CHECK)
            if first[0] != second[0]:
                change = f"{check}: {first[0]} -> {second[0]}"
                changes.append(
                    f"{new.student}: {change}: {_why(previous, new, first, second)}"
                )
        totals = [_points(result.earned) for result in (previous, new)]
        if totals[0] != totals[1]:
            changes.append(f"{new.student}: total: {' -> '.join(totals)}")
    changes += [f"{student}: there is no submission any more" for student in sorted(old)]
    return [one_line(line) for line in changes] or ["nothing changed"]


def _points(earned: float | None) -> str:
    return number(earned) or "blocked"


def _checks(result: Result) -> dict[str, tuple[str, str]]:
    """The points of each check by `question / check`, with the answer."""
    return {
        f"{question.name} / {part.title}": (_points(part.earned), question.answer)
        for question in result.questions
        for part in question.parts
    }


def _why(old: Result, new: Result, first: tuple[str, str], second: tuple[str, str]) -> str:
    points = (first[0], second[0])
    if "-" in points:
        return "the check is new" if first is NO_CHECK else "the check was removed"
    if "blocked" in points:
        return (
            f"the machine could not grade it {'before' if points[0] == 'blocked' else 'now'}"
        )
    if old.problem != new.problem:
        return new.problem or "the file can be read now"
    if first[1] != second[1]:
        return "the answer changed"
    return "the answer is the same: the check, its points, the solution or its seeds changed"
