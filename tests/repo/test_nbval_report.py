"""A notebook's failed cell: Jupyter's number, what was stored and what comes now."""

import os
import subprocess
import sys

import nbformat
import nbval_report
import pytest
from commands import ROOT
from nbformat import v4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """pytest's report on a notebook with wrong outputs, written to a file."""
    folder = tmp_path_factory.mktemp("notebook")

    def cell(source: str, stored: str, count: int):
        output = v4.new_output("stream", text=stored)
        return v4.new_code_cell(source, outputs=[output], execution_count=count)

    cells = [
        v4.new_markdown_cell("# A lesson"),
        cell("print('equal')", "equal\n", 1),
        cell("for i in range(3):\n    print('line', i)", "line 0\nline 7\nline 2\n", 2),
        cell("print('blank ')", "blank\n", 3),
        cell("undefined", "", 4),
        cell("print(1); print(2)", "1\n", 5),
    ]
    (folder / "conftest.py").write_text('pytest_plugins = ["nbval_report"]')
    path = folder / "A.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), path)
    command = [sys.executable, "-m", "pytest", path, "--color=yes", "-p", "no:cacheprovider"]
    command += [
        "--nbval-kernel-name=python3",
        "--rootdir",
        ROOT,
        "-c",
        ROOT / "pyproject.toml",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout and "4 failed" in done.stdout, done.stdout
    return done.stdout


def failure(report: str, number: int) -> str:
    """The part of the report on one cell."""
    return report.partition(f"A.ipynb, In [{number}]: ")[2].partition("\x1b[31m")[0]


def test_the_stored_and_the_new_line_are_named(report):
    text = failure(report, 2)
    assert "stored: line 7\nnow:    line 1\n" in text
    assert "line 0" not in text and "line 2" not in text


def test_the_command_that_makes_the_notebook_afresh_is_named(report, monkeypatch):
    assert "run A.ipynb again and save it" in failure(report, 2)
    cell = nbval_report.NumberedCell.__new__(nbval_report.NumberedCell)
    cell.path = ROOT / "notebooks" / "PT_CNN_Pipeline.ipynb"
    assert "multigpu notebooks run PT_CNN_Pipeline" in cell.fix


def test_the_courses_notebooks_are_reported_so():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    path = "notebooks/PT_CNN_Pipeline.ipynb"
    # A user's own options, such as -v, would change what is printed.
    plain = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, path], cwd=ROOT, env=plain, capture_output=True, text=True
    )
    assert f"{path}::In [1]\n" in done.stdout
