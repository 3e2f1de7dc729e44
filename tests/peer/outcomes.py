"""What became of the peer's tests: read, sort by reason, count."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Category → what it means. Only the first three say something about public behaviour.
CATEGORIES = {
    "passed": "the same result",
    "differs": "another result, or something that is missing",
    "documented": "another result on purpose; the message or the documentation says so",
    "wording": "the same refusal or warning, in this library's words",
    "internal": "the test reads or replaces what is private to Lightning",
    "environment": "the test fails with Lightning itself here, or needs other machines",
    "skipped": "the test skips itself here",
}
UNEXPLAINED = "no entry of reasons.toml matches"


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    result        "passed", "failed" or "skipped"
    other_words   whether an error or a warning had this library's class and words
    error         the error's class and text
    line          the statement of the test that failed
    """

    test: str
    result: str
    other_words: bool = False
    error: str = ""
    line: str = ""

    @property
    def failed(self) -> bool:
        return self.result == "failed"


@dataclass(frozen=True)
class Reason:
    """Why tests fail: those whose name, error or line `pattern` finds."""

    category: str
    reason: str
    pattern: re.Pattern


@dataclass(frozen=True)
class Classified:
    outcome: Outcome
    category: str
    reason: str = ""


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes that the workers of a run wrote. A test's first failure counts."""
    outcomes: dict[str, Outcome] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            outcome = Outcome(**json.loads(line))
            before = outcomes.get(outcome.test)
            if before is None or not before.failed:
                outcomes[outcome.test] = outcome
    return [outcomes[test] for test in sorted(outcomes)]


def read_reasons(path: Path) -> list[Reason]:
    """The entries of reasons.toml, in its order."""
    entries = tomllib.loads(path.read_text())["reason"]
    for entry in entries:
        if entry["category"] not in CATEGORIES:
            raise ValueError(f"{path.name}: {entry['category']!r} is no category")
    return [
        Reason(entry["category"], entry["reason"], re.compile(entry["pattern"]))
        for entry in entries
    ]


def classify(
    outcomes: Iterable[Outcome], of_machine: set[str], reasons: list[Reason]
) -> list[Classified]:
    """Give each outcome a category and a reason.

    of_machine   the tests that fail with Lightning itself
    """
    return [_classify(outcome, of_machine, reasons) for outcome in outcomes]


def _classify(outcome: Outcome, of_machine: set[str], reasons: list[Reason]) -> Classified:
    if outcome.result == "skipped":
        return Classified(outcome, "skipped")
    if not outcome.failed:
        return Classified(outcome, "wording" if outcome.other_words else "passed")
    if outcome.test in of_machine:
        return Classified(outcome, "environment", "fails with Lightning itself here")
    text = f"{outcome.test}\nerror: {outcome.error}\nline: {outcome.line}"
    for reason in reasons:
        if reason.pattern.search(text):
            return Classified(outcome, reason.category, reason.reason)
    return Classified(outcome, "differs", UNEXPLAINED)


def report(classified: list[Classified]) -> dict[str, Any]:
    """The counts, and the tests that fail, by reason. Reasons with most tests come first."""
    counts = Counter(each.category for each in classified)
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for each in classified:
        if each.outcome.failed:
            groups.setdefault((each.category, each.reason), []).append(each.outcome)
    ordered = sorted(
        groups.items(),
        key=lambda item: (list(CATEGORIES).index(item[0][0]), -len(item[1]), item[0][1]),
    )
    return {
        "categories": CATEGORIES,
        "counts": {category: counts[category] for category in CATEGORIES},
        "passed_of_public": _share(counts["passed"], counts["differs"], counts["documented"]),
        "passed_without_documented": _share(counts["passed"], counts["differs"]),
        "left": [
            {"category": category, "reason": reason, "tests": _left(outcomes)}
            for (category, reason), outcomes in ordered
        ],
    }


def _left(outcomes: list[Outcome]) -> dict[str, str]:
    """Test → the first line of its error."""
    return {outcome.test: outcome.error.partition("\n")[0][:120] for outcome in outcomes}


def _share(passed: int, *others: int) -> float:
    """passed / all, rounded to three digits; 0 without tests."""
    return round(passed / max(1, passed + sum(others)), 3)


def table(classified: list[Classified], content: dict[str, Any]) -> str:
    """The report as text: a row per file, the reasons of differences, and the two shares."""
    shown = list(CATEGORIES)
    rows: dict[str, Counter] = {}
    for each in classified:
        file = each.outcome.test.partition("::")[0].removeprefix("tests_pytorch/")
        rows.setdefault(file, Counter())[each.category] += 1
    width = max(map(len, [*rows, "file"]))
    lines = [f"{'file':<{width}}  " + "  ".join(shown)]
    for file, counts in [*rows.items(), ("all", Counter(content["counts"]))]:
        cells = (f"{counts[category]:>{len(category)}}" for category in shown)
        lines.append(f"{file:<{width}}  " + "  ".join(cells))
    lines.append("")
    for group in content["left"]:
        if group["category"] in ("differs", "documented"):
            lines.append(f"{len(group['tests']):4}  {group['category']}: {group['reason']}")
    counts = content["counts"]
    public = counts["passed"] + counts["differs"] + counts["documented"]
    lines.append(
        f"\n{counts['passed']} of {public} tests of public behaviour pass "
        f"({content['passed_of_public']:.1%}); without the documented exceptions "
        f"{content['passed_without_documented']:.1%}"
    )
    return "\n".join(lines)
