"""How the questions did: the mean of each, and how many are right, wrong, blank in its checks.

Files that could not be graded are left out.
"""

import statistics
from collections import Counter
from collections.abc import Sequence

from multigpu.errors import pluralize
from multigpu.grading.results import Result
from multigpu.grading.texts import visible

STATUSES = ("right", "wrong", "blank", "blocked")


def text(results: Sequence[Result]) -> str:
    """A table: a row per question with its mean in percent, and one per check after it.

    Blocked questions are left out of the mean.
    """
    graded = [result.questions for result in results if not result.problem]
    heads = "".join(f"{status:>8}" for status in STATUSES)
    lines = [pluralize(len(graded), "student"), "", f"{'question / check':<44}{heads}    mean"]
    for answers in zip(*graded, strict=True):
        known = [answer.earned for answer in answers if answer.earned is not None]
        first = answers[0]
        mean = f"{statistics.mean(known) / first.points:.0%}" if known else "-"
        lines.append(f"{_cut(first.name):<76}{mean:>8}")
        for place, part in enumerate(first.parts):
            counts = Counter(
                "blank" if answer.blank else answer.parts[place].status for answer in answers
            )
            title = f"  hidden: {part.title}" if part.hidden else f"  {part.title}"
            numbers = "".join(f"{counts[status]:>8}" for status in STATUSES)
            lines.append(f"{_cut(title):<44}{numbers}")
    return "\n".join(lines) + "\n"


def _cut(name: str) -> str:
    name = visible(name)
    return name if len(name) <= 43 else f"{name[:42]}…"
