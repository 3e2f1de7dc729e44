"""The result of grading: per student, question and check. Plain data, kept as JSON.

All reports are made from this; nothing in it depends on the order or number of jobs.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["right", "wrong", "blocked"]


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
    def earned(self) -> float:
        return self.points if self.status == "right" else 0.0


@dataclass
class QuestionResult:
    """A question.

    answer   the student's text; "" if there is none
    printed  what the student's code printed while it was graded, cut
    notes    what is to be said about the answer: missing, twice, too long
    """

    name: str
    title: str
    parts: list[PartResult]
    answer: str = ""
    blank: bool = False
    printed: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> float:
        return sum(part.points for part in self.parts)

    @property
    def earned(self) -> float:
        return sum(part.earned for part in self.parts)

    @property
    def blocked(self) -> bool:
        return any(part.status == "blocked" for part in self.parts)


@dataclass
class Result:
    """One student's submission, graded.

    student    the key of the gradebook: a login, a number, or what the platform gives
    file       the name of the file that was graded; "" if there was none
    submitted  when, in ISO 8601 with the time zone; "" if nothing says so
    problem    why nothing could be graded: the file is no notebook, say; it scores 0
    notes      what is to be said about the submission: an older one was left out, say
    """

    student: str
    file: str
    questions: list[QuestionResult]
    submitted: str = ""
    problem: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> float:
        return sum(question.points for question in self.questions)

    @property
    def earned(self) -> float:
        return sum(question.earned for question in self.questions)

    @property
    def blocked(self) -> bool:
        return any(question.blocked for question in self.questions)

    def to_json(self) -> dict[str, Any]:
        """A dict for json.dump."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Result":
        """The result that to_json() gave. Raises KeyError or TypeError for other data."""
        questions = []
        for each in data["questions"]:
            parts = [PartResult(**part) for part in each["parts"]]
            questions.append(QuestionResult(**(each | {"parts": parts})))
        return cls(**(data | {"questions": questions}))
