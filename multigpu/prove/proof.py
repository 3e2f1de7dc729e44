"""The verdict on a command, and what it rests on."""

from dataclasses import dataclass, field
from typing import Literal

from multigpu.prove.causes import Cause
from multigpu.prove.compare import Comparison

Verdict = Literal["holds", "fails", "unknown"]
EXIT_CODES: dict[Verdict, int] = {"holds": 0, "fails": 1, "unknown": 2}


@dataclass
class Proof:
    """The verdict on a command, and what it rests on.

    line        the last line of the command: "proof: …"
    cause       why the runs differ, or why nothing can be said; None if the proof holds
    notes       what else the reader should know
    tail        the end of what a run printed that failed
    comparison  the runs, step by step; None if there was nothing to compare
    """

    verdict: Verdict
    line: str
    command: str
    reference: str
    cause: Cause | None = None
    notes: list[str] = field(default_factory=list)
    tail: str = ""
    comparison: Comparison | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 holds, 1 fails, 2 nothing can be said."""
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        """What the command prints."""
        lines = [*self.notes]
        if self.tail:
            lines.append(self.tail)
        if self.cause:
            lines.append(f"to do: {self.cause.remedy}")
        return "\n".join([*lines, self.line])

    def _repr_markdown_(self) -> str:
        """In a notebook: the same text."""
        return f"```\n{self}\n```"
