"""A result with what an instructor decided on top: points by hand, then the late penalty.

What was measured stays as it is. All reports are made from Marked.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from multigpu.grading.late import Penalty, Rule
from multigpu.grading.overrides import Override
from multigpu.grading.results import PartResult, QuestionResult, Result


@dataclass
class MarkedPart:
    """A check; `given` are the points by hand, if there are any."""

    measured: PartResult
    given: Override | None = None

    @property
    def earned(self) -> float | None:
        """The points; None if the check is blocked."""
        if self.given is not None:
            return self.given.points
        return None if self.measured.status == "blocked" else self.measured.earned


@dataclass
class MarkedQuestion:
    """A question; `given` are the points by hand for all its checks together."""

    measured: QuestionResult
    parts: list[MarkedPart]
    given: Override | None = None

    @property
    def points(self) -> float:
        return self.measured.points

    @property
    def earned(self) -> float | None:
        """The points; None if a check is blocked that has no points by hand."""
        if self.given is not None:
            return self.given.points
        earned = [part.earned for part in self.parts]
        return None if None in earned else sum(earned)

    @property
    def overrides(self) -> list[Override]:
        given = [self.given, *(part.given for part in self.parts)]
        return [override for override in given if override is not None]


@dataclass
class Marked:
    """One student's marks.

    result     what was measured
    questions  all questions of the lesson, also for a file that could not be read
    penalty    of a late submission; None without a rule
    """

    result: Result
    questions: list[MarkedQuestion]
    penalty: Penalty | None = None

    @property
    def student(self) -> str:
        return self.result.student

    @property
    def points(self) -> float:
        """The most that can be earned."""
        return sum(question.points for question in self.questions)

    @property
    def earned(self) -> float | None:
        """The points before the penalty; None if a question is blocked."""
        earned = [question.earned for question in self.questions]
        return None if None in earned else sum(earned)

    @property
    def taken_off(self) -> float | None:
        """The points that the penalty takes off; None if a question is blocked."""
        if self.earned is None:
            return None
        return self.earned * self.penalty.percent / 100 if self.penalty else 0.0

    @property
    def total(self) -> float | None:
        """The points for the gradebook; None, and never 0, if a question is blocked."""
        if self.earned is None or self.taken_off is None:
            return None
        return self.earned - self.taken_off

    @property
    def blocked(self) -> bool:
        return self.total is None

    @property
    def overrides(self) -> list[Override]:
        return [each for question in self.questions for each in question.overrides]

    @property
    def notes(self) -> list[str]:
        """What is to be said about the submission, the penalty included."""
        why = [self.penalty.why] if self.penalty and self.penalty.why else []
        return [*self.result.notes, *why]

    def to_json(self) -> dict[str, Any]:
        """A dict for json.dump, in which what was measured is apart from what was decided."""
        return {
            "result": self.result.to_json(),
            "overrides": [override.to_json() for override in self.overrides],
            "penalty": self.penalty.to_json() if self.penalty else None,
        }


def mark(
    results: Iterable[Result],
    overrides: Iterable[Override] = (),
    rule: Rule | None = None,
) -> list[Marked]:
    """The marks, in the order of the results.

    A result without a question that others have gets it as a blank answer.
    """
    results = list(results)
    overrides = list(overrides)
    known = {question.name: question for result in results for question in result.questions}
    return [
        _marked(
            result,
            list(known.values()),
            [override for override in overrides if override.student == result.student],
            rule.penalty(result.submitted) if rule else None,
        )
        for result in results
    ]


def from_json(data: list[dict[str, Any]]) -> list[Marked]:
    """The marks of which each gave a dict by to_json(). Raises KeyError or TypeError."""
    if type(data) is not list:
        raise TypeError("expected a list")
    results = [Result.from_json(each["result"]) for each in data]
    overrides = [Override(**given) for each in data for given in each["overrides"]]
    marks = mark(results, overrides)
    for each, one in zip(data, marks, strict=True):
        one.penalty = Penalty(**each["penalty"]) if each["penalty"] else None
    return marks


def _marked(
    result: Result,
    known: list[QuestionResult],
    overrides: list[Override],
    penalty: Penalty | None,
) -> Marked:
    given = {(override.question, override.check): override for override in overrides}
    own = {question.name: question for question in result.questions}
    questions = []
    for question in known:
        measured = own.get(question.name) or _blank(question)
        parts = [
            MarkedPart(part, given.get((question.name, number)))
            for number, part in enumerate(measured.parts, 1)
        ]
        whole = given.get((question.name, 0))
        questions.append(MarkedQuestion(measured, parts, whole))
    return Marked(result, questions, penalty)


def _blank(question: QuestionResult) -> QuestionResult:
    parts = [
        PartResult(part.title, part.points, part.hidden, "wrong") for part in question.parts
    ]
    return QuestionResult(question.name, question.title, parts, blank=True)
