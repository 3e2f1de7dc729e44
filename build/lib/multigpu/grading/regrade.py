"""What changed between two gradings of the same students, and why."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multigpu.grading.csv_cells import number
from multigpu.grading.marks import Marked, MarkedPart, MarkedQuestion
from multigpu.grading.overrides import Override
from multigpu.grading.texts import one_line


@dataclass(frozen=True)
class Change:
    """Points that are not what they were.

    question   "" for the student's total
    check      the check's title; "" for the whole question
    before     the points; None if it was blocked, or not there
    """

    student: str
    question: str
    check: str
    before: float | None
    after: float | None
    why: str

    def to_json(self) -> dict[str, Any]:
        """A dict for json.dump."""
        return asdict(self)


def changes(before: Sequence[Marked], after: Sequence[Marked]) -> list[Change]:
    """The changes per student, question and check, in the order of `after`."""
    old = {one.student: one for one in before}
    new = {one.student: one for one in after}
    found = []
    for student, one in new.items():
        if student not in old:
            found.append(Change(student, "", "", None, one.total, "a new student"))
            continue
        inside = _questions(old[student], one)
        found += inside
        if not same(old[student].total, one.total) or old[student].points != one.points:
            why = _why_total(old[student], one, inside)
            found.append(Change(student, "", "", old[student].total, one.total, why))
    for student, one in old.items():
        if student not in new:
            found.append(
                Change(student, "", "", one.total, None, "there is no submission any more")
            )
    return found


def text(found: Sequence[Change]) -> str:
    """The changes as lines."""
    if not found:
        return "nothing changed\n"
    lines = []
    for change in found:
        what = " / ".join(part for part in (change.question, change.check) if part) or "total"
        before = number(change.before) or "blocked"
        after = number(change.after) or "blocked"
        if change.why == "a new student":
            before = "-"
        elif change.why.startswith("there is no submission"):
            after = "-"
        lines.append(one_line(f"{change.student}: {what}: {before} -> {after}: {change.why}"))
    return "\n".join(lines) + "\n"


def same(before: float | None, after: float | None) -> bool:
    """Whether two points are the same in a gradebook."""
    return number(before) == number(after)


def _questions(before: Marked, after: Marked) -> list[Change]:
    old = {question.measured.name: question for question in before.questions}
    new = {question.measured.name: question for question in after.questions}
    found = []
    for name, question in new.items():
        if name not in old:
            why = "the question is new"
            found.append(Change(after.student, name, "", None, question.earned, why))
            continue
        found += _checks(before, after, old[name], question)
    for name, question in old.items():
        if name not in new:
            why = "the question was removed"
            found.append(Change(after.student, name, "", question.earned, None, why))
    return found


def _checks(
    before: Marked, after: Marked, old: MarkedQuestion, new: MarkedQuestion
) -> list[Change]:
    """The changes of a question: of its checks, unless points by hand replace all of them."""
    name = new.measured.name
    if old.given != new.given or (old.given and new.given):
        if same(old.earned, new.earned):
            return []
        why = _by_hand(old.given, new.given)
        return [Change(after.student, name, "", old.earned, new.earned, why)]
    reason = _answer(before, after, old, new)
    known = _by_title(old.parts)
    found = []
    for key, part in _by_title(new.parts).items():
        title = part.measured.title
        was = known.pop(key, None)
        if was is None:
            why = "the check is new"
            found.append(Change(after.student, name, title, None, part.earned, why))
        elif not same(was.earned, part.earned):
            why = _why(was, part, reason)
            found.append(Change(after.student, name, title, was.earned, part.earned, why))
    for (title, _), part in known.items():
        why = "the check was removed"
        found.append(Change(after.student, name, title, part.earned, None, why))
    return found


def _by_title(parts: Sequence[MarkedPart]) -> dict[tuple[str, int], MarkedPart]:
    """The checks by title; of two with one title, the second has number 2."""
    found: dict[tuple[str, int], MarkedPart] = {}
    for part in parts:
        count = 1
        while (part.measured.title, count) in found:
            count += 1
        found[part.measured.title, count] = part
    return found


def _answer(before: Marked, after: Marked, old: MarkedQuestion, new: MarkedQuestion) -> str:
    """Why another verdict came out of the same check."""
    if before.result.problem != after.result.problem:
        if after.result.problem:
            return f"the file cannot be read now: {after.result.problem}"
        return f"the file could not be read before: {before.result.problem}"
    if old.measured.answer != new.measured.answer:
        return "the answer changed"
    return "the answer is the same: the check, the solution or its seeds changed"


def _why(old: MarkedPart, new: MarkedPart, reason: str) -> str:
    if old.given != new.given:
        return _by_hand(old.given, new.given)
    if new.measured.status == "blocked":
        return "the machine could not grade it this time"
    if old.measured.status == "blocked":
        return "the machine could not grade it before"
    if old.measured.status == new.measured.status:
        points = f"{number(old.measured.points)} to {number(new.measured.points)}"
        return f"the check's points changed from {points}"
    return reason


def _by_hand(old: Override | None, new: Override | None) -> str:
    if new is None:
        return "the points by hand were taken back"
    if old is None:
        return f"points by hand: {new.reason}"
    return f"other points by hand: {new.reason}"


def _percent(one: Marked) -> float:
    return one.penalty.percent if one.penalty else 0.0


def _why_total(before: Marked, after: Marked, inside: Sequence[Change]) -> str:
    why = [f"{len(inside)} change{'s' if len(inside) > 1 else ''} above"] if inside else []
    if _percent(before) != _percent(after):
        now = after.penalty.why if after.penalty else ""
        why.append(now or "no late penalty any more")
    if before.points != after.points:
        why.append(f"out of {number(after.points)} now, not {number(before.points)}")
    return "; ".join(why) or "rounding"
