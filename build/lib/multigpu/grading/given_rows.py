"""Tables that an instructor writes: a CSV file with a header, or a JSON list of objects."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from multigpu.errors import UserError

MAX_BYTES = 16 << 20
# Where a comma separates decimals, spreadsheets write semicolons between cells.
DELIMITERS = ",;\t"


def read(path: Path, columns: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """The rows, each with the place that an error names, such as `points.csv, line 3`.

    Commas, semicolons or tabs separate the cells. Raises UserError if the file cannot be read,
    and if a row or the header lacks one of the columns.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(
                f"{path} is larger than {MAX_BYTES:,} bytes: give a CSV or JSON file."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not in UTF-8: save it as 'CSV UTF-8'.") from None
    if "\x00" in text:
        raise UserError(f"{path} is no text: save it as 'CSV UTF-8'.")
    is_json = path.suffix.lower() == ".json"
    rows = _json_rows(path, text, columns) if is_json else _csv_rows(path, text, columns)
    for where, row in rows:
        missing = [name for name in columns if name not in row]
        if missing:
            raise UserError(
                f"{where}: there is no {' and no '.join(missing)}: expected "
                f"{', '.join(columns)}."
            )
    return rows


def _json_rows(
    path: Path, text: str, columns: tuple[str, ...]
) -> list[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}.") from None
    if type(rows) is not list or any(type(row) is not dict for row in rows):
        raise UserError(f"{path}: expected a list of objects with {', '.join(columns)}.")
    return [(f"{path}, object {number}", row) for number, row in enumerate(rows, 1)]


def _csv_rows(
    path: Path, text: str, columns: tuple[str, ...]
) -> list[tuple[str, dict[str, Any]]]:
    header = text.partition("\n")[0]
    lines = csv.reader(
        io.StringIO(text, newline=""), delimiter=max(DELIMITERS, key=header.count)
    )
    try:
        names = [name.strip().lower() for name in next(lines, [])]
        rows = []
        for row in lines:
            if any(value.strip() for value in row):
                values = dict(zip(names, row, strict=False))
                rows.append((f"{path}, line {lines.line_num}", values))
    except csv.Error as error:
        raise UserError(f"{path} is no CSV: {error}.") from None
    if any(name not in names for name in columns):
        raise UserError(
            f"{path}: the first line is {header.strip()[:80]!r}: expected "
            f"{','.join(columns)}, with commas or semicolons."
        )
    return rows
