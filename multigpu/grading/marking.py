"""What a run of the checks means: an outcome, then the result of each question."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu.grading.results import PartResult, QuestionResult
from multigpu.grading.solution import Question, Solution
from multigpu.grading.transplant import Answers, is_blank

MISSING = "There is no answer."


def to_run(solution: Solution, answers: Answers) -> dict[str, str]:
    """The answers that are not blank."""
    texts = {}
    for question in solution.questions:
        text = answers.sources.get(question.name, "")
        if not is_blank(text, question.released):
            texts[question.name] = text
    return texts


@dataclass
class Outcome:
    """What nbval said of the checks' cells, and what the student's code printed.

    parts     by question and title: [status, lines]
    printed   by question
    seconds   that a plan takes, simulated, by question; only for questions about speed
    problem   why the machine could not run it; "" if it could
    starved   whether a check took too long and waited for a core in that time
    """

    parts: dict[str, dict[str, list]] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    starved: bool = False

    @property
    def blocked(self) -> bool:
        statuses = [status for checks in self.parts.values() for status, _ in checks.values()]
        return bool(self.problem) or "blocked" in statuses


def outcome(cells: list[dict[str, Any]], record: Path, stored: bool = True) -> Outcome:
    """The outcome of a run, from a job's reply.

    record   the file in which the kernel wrote what the checks record
    stored   whether the cells had outputs to compare with, which a student's do not
    """
    result = Outcome()
    for cell in cells:
        if cell["part"] is not None:
            question, title = cell["part"]
            result.parts.setdefault(question, {})[title] = [cell["status"], cell["lines"]]
        elif cell["status"] == "blocked" and not result.problem:
            result.problem = " ".join(cell["lines"])[:400]
    try:
        recorded = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        recorded = []
    for check in recorded:
        result.starved = result.starved or check["starved"]
        part = result.parts.get(check["question"], {}).get(check["title"], ["", []])
        if part[0] in ("right", "wrong"):
            # nbval compares text. A student's text must not be able to please it.
            right = check["right"] and (part[0] == "right" or not stored)
            part[0] = "right" if right else "wrong"
        if check["seconds"] is not None:
            result.seconds[check["question"]] = check["seconds"]
        text = result.printed.get(check["question"], "")
        # The checks of a question print the same, mostly.
        if check["printed"] not in text:
            result.printed[check["question"]] = text + check["printed"]
    return result


def question_results(
    solution: Solution, answers: Answers, run: Outcome, answered: Collection[str]
) -> list[QuestionResult]:
    """The result of each question of a submission.

    answered   the questions that have been run; the others score 0
    """
    return [
        _result(question, answers, run, question.name not in answered)
        for question in solution.questions
    ]


def _result(question: Question, answers: Answers, run: Outcome, blank: bool) -> QuestionResult:
    parts = []
    for part in question.parts:
        status, lines = run.parts.get(part.question, {}).get(part.title, ("", []))
        if blank:
            status, lines = "wrong", [MISSING]
        elif not status:
            status, lines = "blocked", [run.problem or "the check did not run"]
        parts.append(PartResult(part.title, part.points, part.hidden, status, lines))
    return QuestionResult(
        question.name,
        question.title,
        parts,
        answer=answers.sources.get(question.name, ""),
        blank=blank,
        printed=run.printed.get(question.name, ""),
        seconds=run.seconds.get(question.name),
        notes=[note.text for note in answers.notes if note.question == question.name],
    )
