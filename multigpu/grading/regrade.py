"""What changed between two gradings of the same students, and why."""

from collections.abc import Iterator, Sequence

from multigpu.grading.csv_cells import number
from multigpu.grading.results import PartResult, QuestionResult, Result
from multigpu.grading.texts import one_line


def lines(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    """A line per check, question and total whose points are not what they were."""
    old = {one.student: one for one in before}
    new = {one.student: one for one in after}
    found = []
    for student in [*new, *sorted(old.keys() - new.keys())]:
        for what, was, now, why in _of_student(old.get(student), new.get(student)):
            found.append(one_line(f"{student}: {what}: {was} -> {now}: {why}"))
    return found or ["nothing changed"]


Change = tuple[str, str, str, str]  # what, points before, points now, why


def _of_student(old: Result | None, new: Result | None) -> Iterator[Change]:
    if old is None or new is None:
        why = "a new student" if old is None else "there is no submission any more"
        yield "total", _points(old), _points(new), why
        return
    inside = list(_of_questions(old, new))
    yield from inside
    if _points(old) != _points(new) or old.points != new.points:
        why = [f"{len(inside)} change{'s' if len(inside) > 1 else ''} above"] if inside else []
        if old.points != new.points:
            why.append(f"out of {number(new.points)} now, not {number(old.points)}")
        yield "total", _points(old), _points(new), "; ".join(why)


def _of_questions(old: Result, new: Result) -> Iterator[Change]:
    before = {question.name: question for question in old.questions}
    after = {question.name: question for question in new.questions}
    for name in dict.fromkeys([*after, *before]):
        was, now = before.get(name), after.get(name)
        if was is None or now is None:
            why = "the question is new" if was is None else "the question was removed"
            yield name, _points(was), _points(now), why
            continue
        parts = {part.title: part for part in was.parts}
        others = {part.title: part for part in now.parts}
        for title in dict.fromkeys([*others, *parts]):
            first, second = parts.get(title), others.get(title)
            if _points(first) != _points(second):
                why = _why(first, second) or _answer(old, new, was, now)
                yield f"{name} / {title}", _points(first), _points(second), why


def _why(old: PartResult | None, new: PartResult | None) -> str:
    """Why a check has other points; "" if it has another verdict."""
    if old is None:
        return "the check is new"
    if new is None:
        return "the check was removed"
    if new.status == "blocked":
        return "the machine could not grade it this time"
    if old.status == "blocked":
        return "the machine could not grade it before"
    if old.status == new.status:
        return f"the check's points changed from {number(old.points)} to {number(new.points)}"
    return ""


def _answer(old: Result, new: Result, was: QuestionResult, now: QuestionResult) -> str:
    """Why another verdict came out of the same check."""
    if old.problem != new.problem:
        if new.problem:
            return f"the file cannot be read now: {new.problem}"
        return f"the file could not be read before: {old.problem}"
    if was.answer != now.answer:
        return "the answer changed"
    return "the answer is the same: the check, the solution or its seeds changed"


def _points(one: Result | QuestionResult | PartResult | None) -> str:
    if one is None:
        return "-"
    return number(one.earned) or "blocked"
