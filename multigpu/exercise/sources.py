"""The cells that a student's process runs: what is given, and the answers.

A cell's first line says what it is:

    # given                            runs in the notebook and in the student's process
    # answer: shard                      an answer, the name of its question
    # answer: evaluate (needs shard)     this one calls the answer of another question
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multigpu.errors import UserError

IS_GIVEN = re.compile(r"\s*# given\s*$", re.MULTILINE)
GIVEN = "given "  # with a number, the name of a given cell
ANSWER = re.compile(
    r"\s*# answer: ([a-z][a-z0-9_]*)(?: \(needs ([a-z0-9_, ]+)\))?\s*$", re.MULTILINE
)


def is_given(source: str) -> bool:
    """Whether a cell is tagged as given by its first line."""
    return IS_GIVEN.match(source) is not None


def answer_of(source: str) -> str | None:
    """The question that a cell answers, after its first line; None if it is no answer."""
    match = ANSWER.match(source)
    return match[1] if match else None


def needs_of(source: str) -> list[str]:
    """The questions whose answers this answer calls."""
    match = ANSWER.match(source)
    return [name.strip() for name in match[2].split(",")] if match and match[2] else []


@dataclass
class Sources:
    """What runs in the student's process.

    given     texts of the cells that are given
    answers   the text of each question's answer
    needed    the text of each answer that other questions call; in grading it is the solution,
              so that one mistake costs once
    """

    given: Sequence[str]
    answers: Mapping[str, str]
    needed: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, question: str) -> list[tuple[str, str]]:
        """(name, text) of each cell to run for a question, in order.

        Raises UserError if the answer is missing.
        """
        if question not in self.answers:
            raise UserError(
                f"no answer yet: run the cell that begins with `# answer: {question}`, then "
                f"this one."
            )
        cells = [(f"{GIVEN}{number}", text) for number, text in enumerate(self.given, 1)]
        for name in self.needs.get(question, needs_of(self.answers[question])):
            needed = self.needed.get(name) or self.answers.get(name)
            if needed is None:
                raise UserError(
                    f"{question} calls {name}: run the cell that begins with "
                    f"`# answer: {name}` first."
                )
            cells.append((name, needed))
        return [*cells, (question, self.answers[question])]


def from_history(cells: Sequence[str]) -> Sources:
    """The sources among the texts of the cells that a notebook has run.

    A cell that ran twice counts once, with its latest text.
    """
    given: dict[str, None] = {}
    answers: dict[str, str] = {}
    for source in cells:
        if is_given(source):
            given.pop(source, None)
            given[source] = None
        elif name := answer_of(source):
            answers[name] = source
    return Sources(list(given), answers)
