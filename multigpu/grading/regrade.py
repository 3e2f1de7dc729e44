"""What changed between two gradings of the same students, and why."""

from collections.abc import Sequence

from multigpu.grading.csv_cells import number
from multigpu.grading.results import Result
from multigpu.grading.texts import one_line


def lines(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    """A line per check and total whose points are not what they were."""
    old = {one.student: one for one in before}
    new = {one.student: one for one in after}
    found = []
    for student in [*new, *sorted(old.keys() - new.keys())]:
        was, now = _points(old.get(student)), _points(new.get(student))
        for what in sorted(dict.fromkeys([*now, *was]), key="total".__eq__):
            first, second = was.get(what, "-"), now.get(what, "-")
            if first != second and (what == "total" or (was and now)):
                why = _why(old.get(student), new.get(student), what, first, second)
                found.append(one_line(f"{student}: {what}: {first} -> {second}: {why}"))
    return found or ["nothing changed"]


def _points(one: Result | None) -> dict[str, str]:
    """The points of each check by `question / check`, and the total; no entry for None."""
    if one is None:
        return {}
    parts = {
        f"{question.name} / {part.title}": part.earned
        for question in one.questions
        for part in question.parts
    }
    total = {"total": one.earned}
    return {what: number(points) or "blocked" for what, points in (parts | total).items()}


def _why(old: Result | None, new: Result | None, what: str, was: str, now: str) -> str:
    if old is None or new is None:
        return "a new student" if old is None else "there is no submission any more"
    if what == "total":
        return "the changes above"
    if "-" in (was, now):
        return "the check is new" if was == "-" else "the check was removed"
    if "blocked" in (was, now):
        when = "before" if was == "blocked" else "this time"
        return f"the machine could not grade it {when}"
    if old.problem != new.problem:
        return new.problem or "the file can be read now"
    if _answer(old, what) != _answer(new, what):
        return "the answer changed"
    return "the answer is the same: the check, its points, the solution or its seeds changed"


def _answer(one: Result, what: str) -> str:
    name = what.partition(" / ")[0]
    return next(each.answer for each in one.questions if each.name == name)
