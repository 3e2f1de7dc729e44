"""`make test-faults` goes on from rows of the same code alone, also after a kill of itself."""

import json

import fault_rows
import pytest
from commands import ROOT, run


def test_a_row_of_other_code_is_ignored(tmp_path):
    path = tmp_path / "results" / "rows.jsonl"
    assert fault_rows.earlier(path, "new") == []
    old, new = {"seed": 0, "code": "old"}, {"seed": 0, "code": "new"}
    for row in ({"seed": 1}, old, new):
        fault_rows.add(path, row)
    assert fault_rows.earlier(path, "new") == [new]
    assert fault_rows.earlier(path, "old") == [old]


@pytest.mark.parametrize("cut", [1, 2, 12])
def test_a_cut_last_line_is_ignored(tmp_path, cut):
    """Its fault is tried again. If only the line's end is missing, the row is whole."""
    path = tmp_path / "rows.jsonl"
    rows = [{"seed": seed, "code": "new"} for seed in range(3)]
    for row in rows[:2]:
        fault_rows.add(path, row)
    path.write_bytes(path.read_bytes()[:-cut])
    left = rows[: 2 if cut == 1 else 1]
    assert fault_rows.earlier(path, "new") == left
    fault_rows.add(path, rows[2])
    assert fault_rows.earlier(path, "new") == [*left, rows[2]]


@pytest.mark.parametrize(
    ("faults", "folder"), [(10, "results"), (199, "results"), (200, "benchmarks")]
)
def test_the_page_quotes_a_report_of_200_faults_or_more(faults, folder):
    assert fault_rows.report_path(faults) == ROOT / folder / "faults.json"


def test_a_fault_that_failed_is_reported(tmp_path):
    fault = {"target": "host", "signal": "SIGKILL", "moment": "save", "code": "new"}
    failed = {**fault, "seed": 0, "failure": "Failed: …", "seconds": 3.0}
    good = {**fault, "seed": 1, "failure": None, "seconds": 5.0, "killed": True}
    good |= {"launches": 2, "sizes": [1, 2], "difference": 1e-7}
    fault_rows.report([failed, good], tmp_path / "results" / "faults.json")
    found = json.loads((tmp_path / "results" / "faults.json").read_text())
    assert (found["faults"], found["failed"], found["killed"]) == (2, 1, 1)
    assert found["largest difference (world sizes changed)"] == 1e-7
    assert found["launches"] == {"2": 1} and found["signal"] == {"SIGKILL": 2}


IMPORTS = """
import os, sys
sys.path[:0] = ["scripts", "tests/support"]
import faults
import PT_CNN_Elastic
for module in list(sys.modules.values()):
    if path := getattr(module, "__file__", None):
        print("file", os.path.realpath(path))
"""


@pytest.mark.long
@pytest.mark.slow
def test_the_hash_covers_all_that_a_faults_processes_import(tmp_path):
    """A real start: a fork of the warm process has imported more."""
    program = tmp_path / "imports.py"
    program.write_text(IMPORTS)
    done = run("python", program, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    files = {line.removeprefix("file ") for line in done.stdout.splitlines()}
    folders = tuple(f"{ROOT.resolve() / name}/" for name in ("multigpu", "scripts", "tests"))
    own = {path for path in files if path.startswith(folders)}
    assert str(ROOT.resolve() / "multigpu/elastic/writer.py") in own
    assert own <= {str(path.resolve()) for path in fault_rows.code_files()}
