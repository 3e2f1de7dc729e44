"""The rows of `make test-faults`: one for each fault that was tried, with a hash of the code;
and the report, which sums them up.

A row counts only for the code with which it was tried, so a run of older code is repeated.
"""

import hashlib
import json
import os
import statistics
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from commands import ROOT

from multigpu.files import write_json

# Lesson 12's page quotes the report of so many faults or more.
ENOUGH = 200

# The files of this repository that a fault's processes import, and what chooses the fault.
CODE = (
    "scripts/PT_CNN_Elastic.py",
    "multigpu/*.py",
    "multigpu/elastic/*.py",
    "multigpu/launch/*.py",
    "multigpu/models/__init__.py",
    "multigpu/models/cnn.py",
    "tests/support/commands.py",
    "tests/support/elastic_instrumented.py",
    "tests/support/faults.py",
    "tests/support/small_data.py",
    "tests/support/warm.py",
    "tests/support/warm_client.py",
)


def code_files(root: Path = ROOT) -> list[Path]:
    """The files of CODE, in an order that is always the same."""
    return sorted({path for pattern in CODE for path in root.glob(pattern)})


def code_hash(root: Path = ROOT) -> str:
    """A hash of the code under test: this repository's files, and torch's version."""
    found = hashlib.sha256(version("torch").encode())
    for path in code_files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"\n{path.relative_to(root)} {content}".encode())
    return found.hexdigest()[:16]


def earlier(path: Path, code: str) -> list[dict]:
    """The rows of the file that were tried with this code.

    A kill can have cut a line: its fault counts as not tried.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("code") == code:
            rows.append(row)
    return rows


def add(path: Path, row: dict) -> None:
    """Write one more row at the end of the file. After a cut line it begins a new one."""
    path.parent.mkdir(exist_ok=True)
    line = json.dumps(row) + "\n"
    with open(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def report_path(faults: int) -> Path:
    """Where the report of so many faults belongs: the page's figures are those of ENOUGH."""
    return ROOT / ("benchmarks" if faults >= ENOUGH else "results") / "faults.json"


def report(rows: list[dict], path: Path) -> None:
    """Write the report of the rows to a JSON file."""
    good = [row for row in rows if row["failure"] is None]
    same = [row for row in good if len(row["sizes"]) == 1]
    content = {
        "faults": len(rows),
        "failed": len(rows) - len(good),
        "code": rows[0]["code"],
        "killed": sum(row["killed"] for row in good),
        "processes": "real" if "REAL_START" in os.environ else "forks of a warm process",
        "equal to the bit (one world size)": len(same),
        "largest difference (world sizes changed)": max(
            (row["difference"] for row in good if len(row["sizes"]) > 1), default=None
        ),
        "median seconds": statistics.median(row["seconds"] for row in rows),
        "launches": dict(Counter(row["launches"] for row in good)),
        **{
            key: dict(Counter(row[key] for row in rows))
            for key in ("target", "signal", "moment")
        },
        "rows": [{key: row[key] for key in row if key != "code"} for row in rows],
    }
    path.parent.mkdir(exist_ok=True)
    write_json(path, content)
