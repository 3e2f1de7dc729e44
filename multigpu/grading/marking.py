"""One submission marked: which notebook nbval runs for it, and what its outcome means."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu.grading.results import PartResult, QuestionResult
from multigpu.grading.solution import Question, Solution, dumps
from multigpu.grading.transplant import Answers, is_blank

MISSING = "There is no answer."


@dataclass
class Task:
    """The answers of a submission that are to be run.

    answers   by question; blank ones are left out
    """

    id: str
    answers: dict[str, str] = field(default_factory=dict)


def to_run(solution: Solution, answers: Answers) -> dict[str, str]:
    """The answers that are not blank."""
    texts = {}
    for question in solution.questions:
        text = answers.sources.get(question.name, "")
        if not is_blank(text, solution.released_answer(question)):
            texts[question.name] = text
    return texts


def write(
    solution: Solution,
    task: Task,
    folder: Path,
    *,
    secret: str,
    sandbox: str | None,
    own_needs: bool = False,
) -> Path:
    """Write the notebook that checks the task's answers. Returns its path.

    own_needs   whether an answer calls the student's own other answers, not the solution's
    """
    import nbformat

    data = {
        "given": solution.sources("given"),
        "answers": task.answers,
        "needed": {} if own_needs else solution.answers(),
        "needs": {question.name: question.needs for question in solution.questions},
        "secret": secret,
        "sandbox": sandbox,
    }
    answers = folder / f"{task.id}.json"
    answers.write_text(json.dumps(data), encoding="utf-8")
    first = f"from multigpu.grading.kernel import begin\nbegin({str(answers)!r})"
    last = f"from multigpu.grading.kernel import end\nend({str(record_of(folder, task))!r})"
    cells = [nbformat.v4.new_code_cell(first)]
    for cell, role in zip(solution.notebook.cells, solution.roles, strict=True):
        if role in ("setup", "given"):
            cells.append(nbformat.v4.new_code_cell(cell.source))
    for question in solution.questions:
        for part in question.parts if question.name in task.answers else ():
            stored = solution.notebook.cells[part.cell]
            cells.append(
                nbformat.v4.new_code_cell(
                    stored.source,
                    outputs=stored.outputs,
                    execution_count=stored.execution_count or 1,
                    metadata={"part": [part.question, part.title]},
                )
            )
    cells.append(nbformat.v4.new_code_cell(last))
    notebook = folder / f"{task.id}.ipynb"
    notebook.write_text(dumps(nbformat.v4.new_notebook(cells=cells)), encoding="utf-8")
    return notebook


def record_of(folder: Path, task: Task) -> Path:
    """Where the kernel writes what the checks record."""
    return folder / f"{task.id}.printed.json"


@dataclass
class Outcome:
    """What nbval said of a task's cells, and what the student's code printed.

    parts     (question, title) to (status, lines)
    problem   why the machine could not run it; "" if it could
    starved   whether a check took too long and waited for a core in that time
    """

    parts: dict[tuple[str, str], tuple[str, list[str]]] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    starved: bool = False

    @property
    def blocked(self) -> bool:
        statuses = [status for status, _ in self.parts.values()]
        return bool(self.problem) or "blocked" in statuses

    def to_json(self) -> dict[str, Any]:
        """A dict for json.dump."""
        parts = [[*key, status, lines] for key, (status, lines) in self.parts.items()]
        return {"parts": parts, "printed": self.printed, "problem": self.problem}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Outcome":
        """The outcome that to_json() gave."""
        parts = {
            (question, title): (status, lines)
            for question, title, status, lines in data["parts"]
        }
        return cls(parts, dict(data["printed"]), data["problem"])


def outcome(cells: list[dict[str, Any]], record: Path, stored: bool = True) -> Outcome:
    """The outcome of a task, from a job's reply.

    stored   whether the cells had outputs to compare with, which a student's do not
    """
    found = Outcome()
    for cell in cells:
        if cell["part"] is None:
            if cell["status"] == "blocked" and not found.problem:
                found.problem = " ".join(cell["lines"])[:400]
        else:
            found.parts[tuple(cell["part"])] = (cell["status"], cell["lines"])
    try:
        recorded = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        recorded = []
    for each in recorded:
        key = each["question"], each["title"]
        found.starved = found.starved or each["starved"]
        status, lines = found.parts.get(key, ("", []))
        if status in ("right", "wrong"):
            # nbval compares text. A student's text must not be able to please it.
            right = each["right"] and (status == "right" or not stored)
            found.parts[key] = ("right" if right else "wrong", lines)
        text = found.printed.get(each["question"], "")
        # The checks of a question print the same, mostly.
        if each["printed"] not in text:
            found.printed[each["question"]] = text + each["printed"]
    return found


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
        status, lines = run.parts.get((part.question, part.title), ("", []))
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
        notes=[note.text for note in answers.notes if note.question == question.name],
    )
