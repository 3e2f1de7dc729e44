"""The result of grading: per student, question and check. Plain data, kept as JSON.

All reports are made from this; nothing in it depends on the order or number of jobs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Status = Literal["right", "wrong", "blocked"]


class Kind(StrEnum):
    """What a note is about."""

    FILES = "several files"
    NOT_LISTED = "not on the roster"
    NO_ANSWER = "no answer cell"
    OTHER = "other"


@dataclass(frozen=True)
class Note:
    """What is to be said about a submission, or about the answer to a question."""

    text: str
    kind: Kind = Kind.OTHER
    question: str = ""


@dataclass
class PartResult:
    """A check of a question.

    title    what it tests, a few words
    points   the most that it gives
    status   "blocked": the machine could not grade it, which is not the student's fault
    lines    the verdicts; for a hidden check they are for the instructor only
    """

    title: str
    points: float
    hidden: bool
    status: Status
    lines: list[str] = field(default_factory=list)

    @property
    def earned(self) -> float | None:
        """The points; None if the check is blocked."""
        if self.status == "blocked":
            return None
        return self.points if self.status == "right" else 0.0


@dataclass
class QuestionResult:
    """A question.

    answer   the student's text; "" if there is none
    printed  what the student's code printed while it was graded, cut
    seconds  that the answer's plan takes, simulated; None without a plan that can be measured
    """

    name: str
    title: str
    parts: list[PartResult]
    answer: str = ""
    blank: bool = False
    printed: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float | None = None

    @property
    def points(self) -> float:
        return sum(part.points for part in self.parts)

    @property
    def earned(self) -> float | None:
        """The points; None if a check is blocked."""
        return _sum(part.earned for part in self.parts)


@dataclass(frozen=True, order=True)
class Account:
    """A student on a platform, `Canvas` or `Moodle`, by the platform's number."""

    platform: str
    number: str


@dataclass
class Result:
    """One student's submission, graded.

    student    the key of the gradebook: a login, a number, or what the platform gives
    file       the name of the file that was graded; "" if there was none
    account    what Canvas or Moodle finds the student by; None for another source
    problem    why nothing could be graded: the file is no notebook, say; it scores 0
    notes      what is to be said about the submission: an older one was left out, say
    """

    student: str
    file: str
    questions: list[QuestionResult]
    account: Account | None = None
    problem: str = ""
    notes: list[Note] = field(default_factory=list)

    @property
    def points(self) -> float:
        return sum(question.points for question in self.questions)

    @property
    def earned(self) -> float | None:
        """The points for the gradebook; None, and never 0, if a check is blocked."""
        return _sum(question.earned for question in self.questions)

    @property
    def blocked(self) -> bool:
        return self.earned is None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Result":
        """The result that asdict() gave. Raises KeyError or TypeError for other data."""
        questions = []
        for question in data["questions"]:
            parts = [PartResult(**part) for part in question["parts"]]
            questions.append(QuestionResult(**(question | {"parts": parts})))
        notes = [Note(**(note | {"kind": Kind(note["kind"])})) for note in data["notes"]]
        account = Account(**data["account"]) if data["account"] else None
        return cls(**(data | {"questions": questions, "notes": notes, "account": account}))


def _sum(points: Iterable[float | None]) -> float | None:
    known = list(points)
    return None if None in known else sum(known)
