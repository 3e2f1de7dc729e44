"""What is taken off for a late submission: `--late RULE`.

    deadline=2026-11-30T23:59+01:00 10%/day max 50%

    deadline=TIME   in ISO 8601 with the zone; without seconds, the whole minute is in time
    N%/day          taken off for each day that has begun, of the points that were earned;
    N%/hour         or for each hour
    max N%          the most that is taken off; without it, 100%

A submission without a time loses nothing, and a note says so. The time of a file is no time of
a submission: copying changes it. nbgrader's timestamp.txt says one, which nbgrader writes with
the student's rights; for other platforms, --times does (times.py).
"""

import math
import re
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from multigpu.errors import UserError

SECONDS = {"day": 86_400, "hour": 3_600}
RULE = re.compile(
    r"deadline=(?P<time>\S+)\s+(?P<percent>\d+(?:\.\d+)?)%/(?P<unit>day|hour)"
    r"(?:\s+max\s+(?P<most>\d+(?:\.\d+)?)%)?"
)
EXAMPLE = "deadline=2026-11-30T23:59+01:00 10%/day max 50%"


@dataclass(frozen=True)
class Penalty:
    """What a submission loses: `percent` of the points that were earned; `why`, in words."""

    percent: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """A dict for json.dump."""
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """`percent` for each `unit` that has begun after the deadline, at most `most`."""

    deadline: datetime
    percent: float
    unit: str
    most: float = 100.0

    def penalty(self, submitted: str) -> Penalty:
        """What a submission loses that was handed in at this time; "" for an unknown time."""
        try:
            time = datetime.fromisoformat(submitted)
        except ValueError:
            time = None
        if time is None or time.tzinfo is None:
            return Penalty(0.0, "nothing says when it was handed in: nothing is taken off")
        seconds = (time - self.deadline).total_seconds()
        if seconds <= 0:
            return Penalty(0.0, "")
        units = math.ceil(seconds / SECONDS[self.unit])
        percent = min(units * self.percent, self.most)
        begun = f"{units} {self.unit}{'s' if units > 1 else ''}"
        return Penalty(
            percent, f"handed in after the deadline ({begun} begun): {percent:g}% is taken off"
        )


def parse(text: str) -> Rule:
    """Read a rule. Raises UserError for anything that is not one."""
    match = RULE.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--late {text!r} is no rule: expected, for example, {EXAMPLE!r}.")
    try:
        deadline = datetime.fromisoformat(match["time"])
    except ValueError:
        raise UserError(
            f"--late: {match['time']!r} is no time: expected, for example, "
            f"2026-11-30T23:59+01:00."
        ) from None
    if deadline.tzinfo is None:
        day, _, hour = match["time"].partition("T")
        raise UserError(
            f"--late: the deadline {match['time']} has no time with a zone: write, for "
            f"example, deadline={day}T{hour or '23:59'}+01:00."
        )
    if not re.search(r"T\d\d:?\d\d:?\d\d", match["time"]):
        deadline = deadline.replace(second=59, microsecond=999_999)
    percent = float(match["percent"])
    most = float(match["most"] or 100)
    if not 0 < percent <= 100 or not 0 < most <= 100:
        raise UserError(f"--late {text!r}: percentages are above 0 and at most 100.")
    return Rule(deadline, percent, match["unit"], most)
