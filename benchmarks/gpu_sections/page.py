"""The page of a report: its rows as Markdown tables."""

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median

# What the page multiplies a field by: seconds, bytes and ratios are in the JSON file.
SCALES = {"s": 1, "ms": 1e3, "µs": 1e6, "MiB": 2**-20, "%": 100}


def page_of(report: dict) -> str:
    """The Markdown page of a report of gpu_check.py."""
    card, sections = report["card"], report["sections"].values()
    opening = [
        f"# gpu-check on {card['name']}",
        f"Written by `{report['command']}` on {report['started']}. A measured time is a "
        f"median, with the lower and the upper quartile in brackets. What is simulated is "
        f"from a virtual {card['gpu']}. An error is simulated / measured - 1.",
    ]
    if report["rehearsal"]:
        opening = [
            f"# A rehearsal of gpu-check on {card['name']}",
            "**No figure on this page was measured on a GPU.** Sizes are tiny, to exercise "
            "the code.",
        ]
    if not report["complete"]:
        opening.append("**This run was stopped, or ran some sections only.**")
    facts = "\n".join(f"- {name}: {value}" for name, value in card["facts"].items())
    overview = [
        (
            section["title"],
            section["status"],
            len(section["rows"]),
            failures(section),
            len(section["skipped"]),
            f"{section['seconds']:.0f}",
        )
        for section in sections
    ]
    head = ("section", "result", "rows", "failed", "skipped", "took, s")
    parts = [*opening, facts, table(head, overview)]
    for section in sections:
        parts += section_of(section)
    return "\n\n".join(parts) + "\n"


def failures(section: dict) -> int:
    """The number of failed checks and of items that ended with an error."""
    return sum(row.get("ok") is False for row in section["rows"]) + len(section["failed"])


def section_of(section: dict) -> list[str]:
    """The parts of the page for one section."""
    parts = [f"## {section['title']}", section["says"], *summary(section["rows"])]
    units = section["units"]
    # Rows that have other fields than the row before begin a new table.
    for fields, rows in groupby(section["rows"], lambda row: [f for f in units if f in row]):
        head = [f"{name}, {units[name]}".removesuffix(", ") for name in fields]
        body = [[cell(row[name], units[name]) for name in fields] for row in rows]
        parts.append(table(head, body))
    lines = [f"- {one['what']} failed: {one['why']}" for one in section["failed"]]
    lines += [f"- {one['what']} was skipped: {one['why']}" for one in section["skipped"]]
    if section["status"] != "done":
        lines.append(f"- This section {section['status']}.")
    parts.append("\n".join(lines))
    logs = [one.get("log") for one in (section, *section["failed"], *section["rows"])]
    parts += [f"```\n{log}\n```" for log in logs if log]
    return list(filter(None, parts))


def summary(rows: Sequence[dict]) -> list[str]:
    """A table of the errors by the rows' kind, if the rows have errors."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("error") is not None:
            for kind in ("all", row["kind"]):
                found.setdefault(kind, []).append(row["error"])
    body = [
        (kind, len(own), cell(median(map(abs, own)), "%").lstrip("+"), cell(median(own), "%"))
        for kind, own in found.items()
    ]
    head = ("kind", "rows", "median of the errors' sizes, %", "median error, %")
    return [table(head, body)] if body else []


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. A bar in a cell would end it, so bars are replaced."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def cell(value: object, unit: str) -> str:
    """A value in this unit, with three significant digits and without an exponent.

    Quartiles are in brackets; a check holds or fails, or was not made.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "holds" if value else "**fails**"
    if isinstance(value, dict):
        middle, low, high = (cell(value[name], unit) for name in ("median", "low", "high"))
        return f"{middle} ({low} to {high})"
    if not isinstance(value, int | float):
        return str(value)
    scaled = value * SCALES.get(unit, 1)
    if scaled == 0 or not math.isfinite(scaled):
        return f"{scaled:.0f}"
    places = 2 - math.floor(math.log10(abs(scaled)))
    if places > 6:
        return f"{scaled:.2e}"
    sign = "+" if unit == "%" else ""
    return f"{scaled:{sign}.{max(0, places)}f}"
