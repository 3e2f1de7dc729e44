"""The page of a report: its results as Markdown tables."""

import math
from collections.abc import Callable, Sequence
from statistics import median

Row = dict
WORST = 30  # rows of the sweep on the page; the JSON file has all


def page_of(report: dict) -> str:
    """The Markdown page of a report of gpu_check.py."""
    card = report["card"]
    if report["rehearsal"]:
        opening = [
            "# A rehearsal of gpu-check on the CPU",
            "**No figure on this page was measured on a GPU.** The CPU had the GPU's place, "
            "with tiny sizes, to exercise the code.",
        ]
    else:
        opening = [
            f"# gpu-check on {card['name']}",
            f"Written by `{report['command']}` on {report['started']}. Measured times are "
            f"medians, with the lower and the upper quartile in brackets. Simulated times are "
            f"those of a virtual GPU, whose figures are from {card['source']}.",
        ]
    if not report["complete"]:
        opening.append("**This run was stopped, or ran some sections only.**")
    facts = [f"- {name}: {value}" for name, value in card["facts"].items()]
    overview = table(
        ("section", "result", "ok", "failed", "skipped", "seconds"),
        [
            (
                section["title"],
                section["status"],
                sum(row.get("ok") is True for row in section["rows"]),
                failures(section),
                len(section["skipped"]),
                f"{section['seconds']:.0f}",
            )
            for section in report["sections"].values()
        ],
    )
    parts = [*opening, "\n".join(facts), overview]
    for name, section in report["sections"].items():
        parts += section_of(name, section)
    return "\n\n".join(parts) + "\n"


def failures(section: dict) -> int:
    """The number of failed checks and of items that ended with an error."""
    return sum(row.get("ok") is False for row in section["rows"]) + len(section["failed"])


def section_of(name: str, section: dict) -> list[str]:
    """The parts of the page for one section."""
    parts = [f"## {section['title']}"]
    parts += section["notes"]
    rows = section["rows"]
    if rows:
        parts += TABLES.get(name, verdicts)(rows)
    if section["failed"]:
        lines = [f"- {one['what']}: {one['error']}" for one in section["failed"]]
        parts.append("Failed:\n" + "\n".join(lines))
    if section["skipped"]:
        lines = [f"- {one['what']}: {one['why']}" for one in section["skipped"]]
        parts.append("Skipped:\n" + "\n".join(lines))
    if section["status"] != "done":
        parts.append(f"This section {section['status']}.")
    if section.get("log"):
        parts.append(f"```\n{section['log']}\n```")
    return parts


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table. A bar in a cell would end it, so bars are replaced."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", "/").replace("\n", " ") for cell in row] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


def timed(times: dict | None, unit: float) -> str:
    """The median with the quartiles in brackets; `unit` is 1e3 for ms, 1e6 for µs."""
    if times is None:
        return ""
    middle, low, high = (digits(unit * times[name]) for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def digits(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def scaled(value: float | None, unit: float) -> str:
    return "" if value is None else digits(unit * value)


def median_error(rows: Sequence[Row], name: str = "error") -> str:
    """The median of the errors' absolute values; "none" without any."""
    errors = [abs(row[name]) for row in rows if row.get(name) is not None]
    return f"{median(errors):.0%}" if errors else "none"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A table of checks: the case, the verdict, and what else the row has."""
    words = {True: "holds", False: "**fails**", None: ""}

    def rest(row: Row) -> str:
        hidden = ("case", "ok", "log", "losses", "virtual_losses")
        found = {name: value for name, value in row.items() if name not in hidden}
        return ", ".join(f"{name} {short(value)}" for name, value in found.items())

    body = [(row["case"], words[row.get("ok")], rest(row)) for row in rows]
    return [table(("case", "verdict", "found"), body)]


def short(value: object) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{timed(value, 1e6)} µs"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def steps(rows: Sequence[Row]) -> list[str]:
    body = [
        (
            row["case"],
            timed(row["measured"], 1e3),
            scaled(row["simulated"], 1e3),
            percent(row["error"]),
            percent(row["null_error"]),
        )
        for row in rows
    ]
    later = [row for row in rows if row["null_error"]]
    return [
        f"Median error {median_error(rows)}. Without each model's smallest batch, which the "
        f"null model takes from the measurement: {median_error(later)}, and the null model's "
        f"{median_error(later, 'null_error')}.",
        table(("step", "measured, ms", "simulated, ms", "error", "null model's"), body),
    ]


def sweep(rows: Sequence[Row]) -> list[str]:
    compared = [row for row in rows if row.get("error") is not None]
    worst = sorted(compared, key=lambda row: -abs(math.log1p(max(row["error"], -0.999999))))
    kinds = list(dict.fromkeys((row["kind"], row["precision"]) for row in compared))
    by_kind = []
    for kind, precision in kinds:
        own = [r for r in compared if (r["kind"], r["precision"]) == (kind, precision)]
        bias = median(row["error"] for row in own)
        by_kind.append((kind, precision, len(own), median_error(own), percent(bias)))
    body = [
        (
            row["case"],
            timed(row["measured"], 1e6),
            scaled(row["simulated"], 1e6),
            percent(row["error"]),
        )
        for row in worst[:WORST]
    ]
    return [
        f"Median error of {len(compared)} kernels: {median_error(compared)}.",
        table(("kind", "precision", "kernels", "median error", "median bias"), by_kind),
        f"The {len(body)} worst:",
        table(("kernel", "measured, µs", "simulated, µs", "error"), body),
    ]


def launches(rows: Sequence[Row]) -> list[str]:
    body = [
        (
            row["case"],
            timed(row["host"], 1e6),
            timed(row["kernel"], 1e6),
            scaled(row["together"], 1e6),
            scaled(row["simulated"], 1e6),
            percent(row["error"]),
        )
        for row in rows
    ]
    head = ("operation", "host, µs", "kernel, µs", "together, µs", "simulated, µs", "error")
    return [f"Median error {median_error(rows)}.", table(head, body)]


def memory(rows: Sequence[Row]) -> list[str]:
    names = ("before", "allocated", "reserved", "simulated")
    body = [
        (row["case"], *(scaled(row[name], 2**-20) for name in names), percent(row["error"]))
        for row in rows
    ]
    head = ("training", *(f"{name}, MiB" for name in names), "error")
    return [f"Median error of allocated: {median_error(rows)}.", table(head, body)]


def error_texts(rows: Sequence[Row]) -> list[str]:
    differing = [row for row in rows if row["ok"] is False]
    same = ", ".join(row["case"] for row in rows if row["ok"])
    body = [
        (
            row["case"],
            f"{row['error']}: {row['text']}",
            f"{row['virtual_error']}: {row['virtual_text']}",
        )
        for row in differing
    ]
    parts = [f"The same class and text: {same or 'none'}."]
    return [*parts, *([table(("mistake", "GPU", "virtual GPU"), body)] if body else [])]


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "steps": steps,
    "sweep": sweep,
    "launches": launches,
    "memory": memory,
    "error_texts": error_texts,
}
