"""CSV files that no spreadsheet runs: text from students never becomes a formula.

A spreadsheet takes a cell that begins with = + - @ for a formula, also after a tab or a
carriage return (OWASP, CSV Injection). Where a semicolon separates cells, a cell can begin in
the middle of another one.
"""

import csv
import io
import re
from collections.abc import Iterable

from multigpu.grading.texts import visible

# Spreadsheets in East Asian languages take the wide forms too.
START = re.compile(r"""(^|[;\n][\s"]*)(?=[\s"]*[=+\-@\uff1d\uff0b\uff0d\uff20])""")


def cell(text: str) -> str:
    """The text as a cell: a ' before what would be a formula, no control character."""
    return START.sub(r"\1'", visible(text).replace("\t", " "))


def number(value: float | None) -> str:
    """At most two decimals, with a point; "" for None."""
    if value is None:
        return ""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def table(rows: Iterable[Iterable[str | float | None]]) -> str:
    """The rows as CSV; texts pass through cell()."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        writer.writerow(
            cell(value) if isinstance(value, str) else number(value) for value in row
        )
    return file.getvalue()
