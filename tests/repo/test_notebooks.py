"""`notebooks check` reports every difference between notebook and script; `run` removes it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from commands import ROOT

from multigpu import notebooks
from multigpu.errors import UserError
from multigpu.notebooks import cells, running, source

pytestmark = pytest.mark.slow

SCRIPT = """\
# ---
# jupyter:
#   jupytext:
#     formats: notebooks//ipynb,scripts//py:percent
# ---

# %% [markdown]
# # A lesson
#
# With two paragraphs.

# %%
import os


def double(x):
    return 2 * x


# %% tags=["active-ipynb"]
# # explore
# print("twice 21 is", double(21))

# %%
# !printf 'from %s\\\\n' "$(basename "$PWD")" \\\\
#     && dirname "$(command -v python)"
print("PYTEST_CURRENT_TEST" in os.environ)

# %% tags=["raises-exception"]
1 / 0

# %% tags=["nbval-raises-exception"]
raise KeyError("announced")

# %%

# %% tags=["active-py"]
if __name__ == "__main__":
    print(double(4))
""".replace("\\\\", "\\")


def folder(at: Path, **scripts: str) -> Path:
    (at / "scripts").mkdir(exist_ok=True)
    (at / "notebooks").mkdir(exist_ok=True)
    (at / "pyproject.toml").touch()
    for stem, text in scripts.items():
        (at / "scripts" / f"{stem}.py").write_text(text)
    return at


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> str:
    """The notebook of SCRIPT, made once."""
    root = folder(tmp_path_factory.mktemp("stored"), A=SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        # as if the environment were not activated
        patch.setenv("PATH", "/usr/bin:/bin")
        assert notebooks.run("A", root) == []
    return (root / "notebooks" / "A.ipynb").read_text()


@pytest.fixture
def pair(tmp_path, stored) -> Path:
    root = folder(tmp_path, A=SCRIPT)
    (root / "notebooks" / "A.ipynb").write_text(stored)
    return root


def edit(root: Path, change) -> None:
    path = root / "notebooks" / "A.ipynb"
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


def test_the_courses_notebooks_match_their_scripts():
    assert notebooks.check(root=ROOT) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_no_cell_prints_a_line_that_a_browser_breaks(path):
    printed = cells.printed(nbformat.read(path, as_version=4))
    # A proof's line is as long as its numbers; it is broken once, at its end.
    lines = [line for line in printed.splitlines() if not line.startswith("proof: ")]
    assert [line for line in lines if len(line) > 95] == []


@pytest.mark.parametrize(
    "path",
    sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(ROOT.glob("lessons/*/*.ipynb")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_no_sentence_is_broken_into_a_list(path):
    """A line that begins with "1) " or "- " begins a list, also in the middle of a formula."""
    assert list(lists_in_sentences(path)) == []


def lists_in_sentences(path):
    """The first lines of lists that follow a line in the middle of a sentence."""
    for cell in nbformat.read(path, as_version=4).cells:
        before = ""
        in_list = False
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
            item = re.match(r"\s*(1[.)]|[-+*]) ", line)
            if item and not in_list and re.search(r"[^.:?!*]$", before) and before[0] != "#":
                yield line
            in_list = bool(line and (item or in_list))
            before = line


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        if source.path_of(path.stem, ROOT) is None
    ],
    ids=lambda path: path.stem,
)
def test_what_is_not_read_in_the_lesson_is_folded(path):
    """The imports, the flags, `main` and the cell that starts the script."""
    begins = r"^(import argparse|def parse\(|def main\(|if __name__ ==)"
    dull = re.compile(begins, re.MULTILINE)
    found = [c for c in nbformat.read(path, as_version=4).cells if dull.search(c.source)]
    assert len(found) >= 4
    shown = [c for c in found if not c.metadata.get("jupyter", {}).get("source_hidden")]
    assert [cell.source.splitlines()[0] for cell in shown] == []


# ---- run ------------------------------------------------------------------------------------


def test_run_makes_a_notebook_that_matches(pair, stored):
    assert notebooks.check(root=pair) == []
    notebook = nbformat.reads(stored, as_version=4)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds == ["markdown", "code", "code", "code", "code", "code", "code", "raw"]
    assert notebook.cells[2].source == '# explore\nprint("twice 21 is", double(21))'
    assert notebook.cells[2].outputs[0].text == "twice 21 is 42\n"
    shell = notebook.cells[3].outputs[0].text.replace("\r", "").splitlines()
    assert shell == ["from notebooks", str(Path(sys.executable).parent), "False"]
    counts = [cell.get("execution_count") for cell in notebook.cells]
    assert counts == [None, 1, 2, 3, 4, 5, None, None]


def test_run_again_changes_nothing(pair, stored):
    notebooks.run("A", pair)
    assert (pair / "notebooks" / "A.ipynb").read_text() == stored
    assert "version" not in nbformat.reads(stored, as_version=4).metadata.language_info
    assert os.listdir(pair / "notebooks") == ["A.ipynb"]


def test_run_updates_the_notebook_of_a_changed_script(pair):
    script = pair / "scripts" / "A.py"
    script.write_text(SCRIPT.replace("twice 21", "two times 21"))
    assert "does not match" in notebooks.check(root=pair)[0]
    notebooks.run("A", pair)
    assert notebooks.check(root=pair) == []


@pytest.mark.parametrize(
    ("cell", "facts"),
    [
        (
            "values = []\nvalues[3]",
            ["In [2]", "values = []", "IndexError: list index out of range"],
        ),
        ("# !echo the cause; exit 3", ["In [2]", "the cause", "non-zero exit status 3"]),
        ("import os\nos._exit(1)", ["In [2]", "the kernel died"]),
        ("import time\ntime.sleep(60)", ["In [2]", "still running after 4 s"]),
        ("input()", ["In [2]", "StdinNotImplementedError"]),
    ],
)
def test_run_leaves_the_old_notebook_if_a_cell_fails(tmp_path, monkeypatch, cell, facts):
    monkeypatch.setattr(running, "SECONDS_PER_CELL", 4 if "sleep" in cell else 30)
    root = folder(tmp_path, A=f"# %%\nprint(1)\n\n# %%\n{cell}\n")
    old = root / "notebooks" / "A.ipynb"
    old.write_text("the old one")
    with pytest.raises(notebooks.CellFailed) as failure:
        notebooks.run("A", root)
    for fact in facts:
        assert fact in str(failure.value)
    assert old.read_text() == "the old one"
    assert os.listdir(old.parent) == ["A.ipynb"]


def test_run_reports_this_machines_path(tmp_path):
    root = folder(tmp_path, A="# %%\nimport os\nprint(os.getcwd())\n")
    assert [remark[:6] for remark in notebooks.run("A", root)] == ["In [1]"]


def test_equal_cells_get_different_ids(tmp_path):
    root = folder(tmp_path, A="# %%\nprint(1)\n\n# %%\nprint(1)\n")
    notebooks.run("A", root)
    assert notebooks.check(root=root) == []


def test_run_explains_an_unreadable_script(tmp_path):
    root = folder(tmp_path, A="")
    (root / "scripts" / "A.py").write_bytes(b"# %%\nx = '\xff'\n")
    with pytest.raises(UserError, match=r"scripts/A\.py cannot be read"):
        notebooks.run("A", root)


def test_an_unknown_stem_names_similar_ones(pair):
    with pytest.raises(UserError, match="did you mean A"):
        notebooks.select(["AA"], pair)
    with pytest.raises(UserError, match="did you mean A"):
        notebooks.check(["PT_nothing_like_it"], pair)


# ---- check: each of these mutations must be found -------------------------------------------


def only(findings: list[str], *facts: str) -> None:
    assert len(findings) == 1, findings
    for fact in facts:
        assert fact in findings[0]


def test_a_changed_script(pair):
    (pair / "scripts" / "A.py").write_text(SCRIPT.replace("return 2 * x", "return x + x"))
    only(
        notebooks.check(root=pair), "does not match", "-    return 2 * x", "+    return x + x"
    )


def test_a_changed_notebook(pair):
    edit(pair, lambda n: n.cells[0].update(source="# Another lesson"))
    only(notebooks.check(root=pair), "does not match", "-# # Another lesson")


@pytest.mark.parametrize("cell", [0, 1])
def test_a_lost_blank_line_within_a_cell(pair, cell):
    """In Markdown it joins two paragraphs, in a string it changes what is printed."""
    edit(
        pair,
        lambda n: n.cells[cell].update(source=n.cells[cell].source.replace("\n\n", "\n", 1)),
    )
    only(notebooks.check(root=pair), "does not match")


def test_blank_lines_between_cells_do_not_count(pair):
    """ruff leaves two of them after a function, jupytext sometimes one."""
    for blank in ("\n\n", "\n\n\n"):
        header, first, rest = SCRIPT.partition("# %%")
        rest = re.sub(r"\n+# %%", f"{blank}# %%", rest)
        (pair / "scripts" / "A.py").write_text(header + first + rest)
        assert notebooks.check(root=pair) == []


def test_two_cells_swapped(pair):
    def swap(notebook):
        notebook.cells[1], notebook.cells[2] = notebook.cells[2], notebook.cells[1]

    edit(pair, swap)
    findings = notebooks.check(root=pair)
    assert "does not match" in findings[0]
    assert "out of order: In [2] stands in the place of In [1]" in findings[1]


def test_a_cell_deleted(pair):
    edit(pair, lambda n: n.cells.pop(3))
    findings = notebooks.check(root=pair)
    assert "does not match" in findings[0]
    assert "out of order" in findings[1]


def test_a_cell_never_executed(pair):
    edit(pair, lambda n: n.cells[2].update(execution_count=None))
    only(notebooks.check(root=pair), "not executed: In [2]")


def test_a_cell_executed_twice(pair):
    edit(pair, lambda n: n.cells[5].update(execution_count=9))
    only(notebooks.check(root=pair), "out of order: In [9] stands in the place of In [5]")


def test_a_stored_error(pair):
    error = nbformat.v4.new_output(
        "error", ename="ValueError", evalue="no\nsecond line", traceback=[]
    )
    edit(pair, lambda n: n.cells[1].outputs.append(error))
    error_found, changed = notebooks.check(root=pair)
    assert "In [1]" in error_found and "ValueError: no (" in error_found
    assert "In [1]" in changed and "stored output" in changed


def test_an_error_no_longer_announced(pair):
    edit(pair, lambda n: n.cells[4].metadata.pop("tags"))
    findings = notebooks.check(root=pair)
    assert "does not match" in findings[0]
    assert "In [4]" in findings[1] and "ZeroDivisionError" in findings[1]


def test_a_comment_for_nbval(pair):
    """A learner's copy shows comments. nbval and this course read the tag, which it hides."""
    edit(pair, lambda n: n.cells[2].update(source=f"# NBVAL_SKIP\n{n.cells[2].source}"))
    findings = notebooks.check(root=pair)
    assert "does not match" in findings[0]
    assert "In [2]" in findings[1] and "nbval-skip" in findings[1]


def test_a_tag_changed_to_active_ipynb(pair):
    """The script would then run code that is for the notebook only."""
    script = pair / "scripts" / "A.py"
    script.write_text(SCRIPT.replace('# # explore\n# print("twice', '# explore\nprint("twice'))
    only(
        notebooks.check(root=pair),
        "scripts/A.py changes",
        '-# print("twice 21',
        '+print("twice 21',
    )


def test_a_magic_not_commented_out(pair):
    script = pair / "scripts" / "A.py"
    script.write_text(SCRIPT.replace("import os\n", "%pwd\nimport os\n"))
    assert "scripts/A.py changes" in notebooks.check(root=pair)[0]


def test_a_script_or_a_notebook_alone(pair):
    (pair / "scripts" / "B.py").write_text(SCRIPT)
    (pair / "notebooks" / "A.ipynb").rename(pair / "notebooks" / "C.ipynb")
    first, second, third = notebooks.check(root=pair)
    assert "scripts/A.py has no notebook" in first
    assert "scripts/B.py has no notebook" in second
    assert "notebooks/C.ipynb has no script" in third
    with pytest.raises(UserError, match="has no script"):
        notebooks.run("C", pair)


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: cell.outputs[0].update(text="twice 21 is 43\n"),
        lambda cell: cell.outputs.clear(),
        lambda cell: cell.outputs.append(cell.outputs[0]),
    ],
)
def test_a_stored_output_changed_by_hand(pair, change):
    edit(pair, lambda n: change(n.cells[2]))
    only(notebooks.check(root=pair), "stored output of In [2]", "(multigpu notebooks run A)")


def test_a_notebook_that_the_command_did_not_make(pair):
    edit(pair, lambda n: n.metadata.pop("multigpu"))
    only(notebooks.check(root=pair), "no record of its outputs")


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        ("guess_a = 1\nprint(guess_a)", "print(guess_a)"),
        ("speed = 2", "speed = 2"),
        ("guess_a = None", "no value for guess_a"),
        ("guess_a, guess_b = 1, 2", "guess_a, guess_b"),
        ("# nothing", "assigns nothing"),
    ],
)
def test_a_guess_cell_that_is_more_than_guesses(pair, source, fact):
    def change(notebook):
        notebook.cells[2].update(source=source)
        notebook.cells[2].metadata.tags = ["active-ipynb", "guess"]

    edit(pair, change)
    findings = notebooks.check(root=pair)
    assert "does not match" in findings[0]
    assert "In [2], tagged guess" in findings[1] and fact in findings[1]


# ---- text: prose without a run --------------------------------------------------------------


def test_prose_is_taken_over_and_outputs_stay(pair, stored):
    script = pair / "scripts" / "A.py"
    new = SCRIPT.replace("# A lesson", "# A better lesson") + "\n# %% [markdown]\n# The end.\n"
    script.write_text(
        new.replace("# %%\nimport os", '# %% jupyter={"source_hidden": true}\nimport os')
    )
    assert notebooks.check(root=pair) != []
    assert notebooks.update_text("A", pair)
    assert notebooks.check(root=pair) == []
    now = nbformat.read(pair / "notebooks" / "A.ipynb", as_version=4)
    before = nbformat.reads(stored, as_version=4)
    assert [c.outputs for c in now.cells if c.cell_type == "code"] == [
        c.outputs for c in before.cells if c.cell_type == "code"
    ]
    assert now.cells[0].source.startswith("# A better lesson")
    assert now.cells[1].metadata.jupyter == {"source_hidden": True}
    assert not notebooks.update_text("A", pair)


def test_changed_code_must_run(pair, stored):
    (pair / "scripts" / "A.py").write_text(SCRIPT.replace("twice 21", "two times 21"))
    with pytest.raises(UserError, match="multigpu notebooks run A"):
        notebooks.update_text("A", pair)
    assert (pair / "notebooks" / "A.ipynb").read_text() == stored


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}', "\x00"]
)
def test_a_broken_notebook(pair, text):
    (pair / "notebooks" / "A.ipynb").write_text(text)
    only(notebooks.check(root=pair), "notebooks/A.ipynb cannot be read")


# ---- the command ----------------------------------------------------------------------------


def multigpu(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "multigpu.cli", "notebooks", *arguments]
    return subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=120)


def test_the_command(pair):
    # from a folder below the course's
    done = multigpu(pair / "notebooks", "check")
    assert (done.returncode, done.stderr) == (0, "")
    (pair / "scripts" / "A.py").write_text("# %%\n1 / 0\n")
    done = multigpu(pair, "check", "A")
    assert done.returncode == 1
    finding = done.stdout.splitlines()[0]
    for fact in ("notebooks/A.ipynb", "scripts/A.py", "(multigpu notebooks run A)"):
        assert fact in finding
    done = multigpu(pair, "run")
    assert done.returncode == 1
    assert "scripts/A.py: In [1] failed" in done.stderr and "Traceback" not in done.stderr
    done = multigpu(pair, "run", "a")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert "no scripts/a.py" in done.stderr and "did you mean A?" in done.stderr
