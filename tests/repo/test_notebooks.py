"""`notebooks check` reports every difference between notebook and source; `run` removes it."""

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
from multigpu.notebooks import cells, running

pytestmark = pytest.mark.slow

SOURCE = r"""# A lesson

With two paragraphs.

```python
import os


def double(x):
    return 2 * x
```

```python
# explore
print("twice 21 is", double(21))
```

```python
!printf 'from %s\n' "$(basename "$PWD")" \
    && dirname "$(command -v python)"
print("PYTEST_CURRENT_TEST" in os.environ)
```

```python tags=["raises-exception"]
1 / 0
```

```python tags=["nbval-raises-exception"]
raise KeyError("announced")
```

```python

```
"""
PAGE = "lessons/01-x"


def folder(at: Path, **sources: str) -> Path:
    (at / PAGE).mkdir(parents=True, exist_ok=True)
    for name in ("notebooks", "scripts"):
        (at / name).mkdir(exist_ok=True)
    (at / "pyproject.toml").touch()
    for stem, text in sources.items():
        (at / PAGE / f"{stem}.md").write_text(text)
    return at


def fences(*sources: str) -> str:
    """A source with these cells."""
    return "\n".join(f"```python\n{text}\n```\n" for text in sources)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> str:
    """The notebook of SOURCE, made once."""
    root = folder(tmp_path_factory.mktemp("stored"), A=SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        # as if the environment were not activated
        patch.setenv("PATH", "/usr/bin:/bin")
        assert notebooks.run("A", root) == []
    return (root / "notebooks" / "A.ipynb").read_text()


@pytest.fixture
def pair(tmp_path, stored) -> Path:
    root = folder(tmp_path, A=SOURCE)
    (root / "notebooks" / "A.ipynb").write_text(stored)
    return root


def edit(root: Path, change) -> None:
    path = root / "notebooks" / "A.ipynb"
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


def test_the_courses_notebooks_match_their_sources():
    assert notebooks.check(root=ROOT) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_no_cell_prints_a_line_that_a_browser_breaks(path):
    printed = cells.printed(nbformat.read(path, as_version=4))
    # The lines that end a proof are as long as their numbers.
    lines = [
        each for each in printed.splitlines() if not each.startswith(("proof: ", "to do: "))
    ]
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


# ---- run ------------------------------------------------------------------------------------


def test_run_makes_a_notebook_that_matches(pair, stored):
    assert notebooks.check(root=pair) == []
    notebook = nbformat.reads(stored, as_version=4)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds == ["markdown", *["code"] * 6]
    assert notebook.cells[2].source == '# explore\nprint("twice 21 is", double(21))'
    assert notebook.cells[2].outputs[0].text == "twice 21 is 42\n"
    shell = notebook.cells[3].outputs[0].text.replace("\r", "").splitlines()
    assert shell == ["from notebooks", str(Path(sys.executable).parent), "False"]
    counts = [cell.get("execution_count") for cell in notebook.cells]
    assert counts == [None, 1, 2, 3, 4, 5, None]


def test_run_again_changes_nothing(pair, stored):
    notebooks.run("A", pair)
    assert (pair / "notebooks" / "A.ipynb").read_text() == stored
    assert "version" not in nbformat.reads(stored, as_version=4).metadata.language_info
    assert os.listdir(pair / "notebooks") == ["A.ipynb"]


def test_run_updates_the_notebook_of_a_changed_source(pair):
    (pair / PAGE / "A.md").write_text(SOURCE.replace("twice 21", "two times 21"))
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
        ("!echo the cause; exit 3", ["In [2]", "the cause", "non-zero exit status 3"]),
        ("import os\nos._exit(1)", ["In [2]", "the kernel died"]),
        ("import time\ntime.sleep(60)", ["In [2]", "still running after 4 s"]),
        ("input()", ["In [2]", "StdinNotImplementedError"]),
    ],
)
def test_run_leaves_the_old_notebook_if_a_cell_fails(tmp_path, monkeypatch, cell, facts):
    monkeypatch.setattr(running, "SECONDS_PER_CELL", 4 if "sleep" in cell else 30)
    root = folder(tmp_path, A=fences("print(1)", cell))
    old = root / "notebooks" / "A.ipynb"
    old.write_text("the old one")
    with pytest.raises(notebooks.CellFailed) as failure:
        notebooks.run("A", root)
    for fact in facts:
        assert fact in str(failure.value)
    assert old.read_text() == "the old one"
    assert os.listdir(old.parent) == ["A.ipynb"]


def test_run_reports_this_machines_path(tmp_path):
    root = folder(tmp_path, A=fences("import os\nprint(os.getcwd())"))
    assert [remark[:6] for remark in notebooks.run("A", root)] == ["In [1]"]


def test_equal_cells_get_different_ids(tmp_path):
    root = folder(tmp_path, A=fences("print(1)", "print(1)"))
    notebooks.run("A", root)
    assert notebooks.check(root=root) == []


def test_run_explains_an_unreadable_source(tmp_path):
    root = folder(tmp_path, A="")
    (root / PAGE / "A.md").write_bytes(b"```python\nx = '\xff'\n```\n")
    with pytest.raises(UserError, match=r"A\.md cannot be read"):
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


MATCH = "does not match"


def lose_blank_line(cell) -> None:
    cell.update(source=cell.source.replace("\n\n", "\n", 1))


def swap(cells) -> None:
    cells[1], cells[2] = cells[2], cells[1]


def stored_error(cells) -> None:
    error = {"ename": "ValueError", "evalue": "no\nsecond line", "traceback": []}
    cells[1].outputs.append(nbformat.v4.new_output("error", **error))


# A change of the notebook's cells, and what each finding says.
CHANGES = {
    "another text": (
        lambda cells: cells[0].update(source="# Another lesson"),
        ["-# Another lesson"],
    ),
    # In Markdown it joins two paragraphs, in a string it changes what is printed.
    "a blank line of the text lost": (lambda cells: lose_blank_line(cells[0]), [MATCH]),
    "a blank line of the code lost": (lambda cells: lose_blank_line(cells[1]), [MATCH]),
    "two cells swapped": (swap, [MATCH, "In [2] stands in the place of In [1]"]),
    "a cell deleted": (lambda cells: cells.pop(3), [MATCH, "out of order"]),
    "a cell never executed": (
        lambda cells: cells[2].update(execution_count=None),
        ["not executed: In [2]"],
    ),
    "a cell executed twice": (
        lambda cells: cells[5].update(execution_count=9),
        ["out of order: In [9] stands in the place of In [5]"],
    ),
    "a stored error": (stored_error, ["ValueError: no (", "stored output"]),
    "an error no longer announced": (
        lambda cells: cells[4].metadata.pop("tags"),
        [MATCH, "ZeroDivisionError"],
    ),
    # A learner's copy shows comments. nbval and this course read the tag, which it hides.
    "a comment for nbval": (
        lambda cells: cells[2].update(source=f"# NBVAL_SKIP\n{cells[2].source}"),
        [MATCH, "nbval-skip"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_notebook_is_found(pair, name):
    change, facts = CHANGES[name]
    edit(pair, lambda notebook: change(notebook.cells))
    findings = notebooks.check(root=pair)
    assert all(any(fact in found for found in findings) for fact in facts), findings


def test_a_changed_source_is_found(pair):
    (pair / PAGE / "A.md").write_text(SOURCE.replace("return 2 * x", "return x + x"))
    only(
        notebooks.check(root=pair), "does not match", "-    return 2 * x", "+    return x + x"
    )


def test_a_source_or_a_notebook_alone(pair):
    (pair / PAGE / "B.md").write_text(SOURCE)
    (pair / "notebooks" / "A.ipynb").rename(pair / "notebooks" / "C.ipynb")
    first, second, third = notebooks.check(root=pair)
    assert "01-x/A.md has no notebook" in first
    assert "01-x/B.md has no notebook" in second
    assert "notebooks/C.ipynb has no source" in third
    with pytest.raises(UserError, match="has no source"):
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
        notebook.cells[2].metadata.tags = ["guess"]

    edit(pair, change)
    findings = notebooks.check(root=pair)
    assert "does not match" in findings[0]
    assert "In [2], tagged guess" in findings[1] and fact in findings[1]


# ---- text: prose without a run --------------------------------------------------------------


def test_prose_is_taken_over_and_outputs_stay(pair, stored):
    (pair / PAGE / "A.md").write_text(
        f"{SOURCE.replace('A lesson', 'A better lesson')}\nEnd.\n"
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
    assert now.cells[-1].source == "End."
    assert not notebooks.update_text("A", pair)


def test_changed_code_must_run(pair, stored):
    (pair / PAGE / "A.md").write_text(SOURCE.replace("twice 21", "two times 21"))
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
    assert multigpu(pair, "claims").returncode == 0
    # from a folder below the course's
    done = multigpu(pair / "notebooks", "check")
    assert (done.returncode, done.stderr) == (0, "")
    (pair / PAGE / "A.md").write_text(fences("1 / 0"))
    done = multigpu(pair, "check", "A")
    assert done.returncode == 1
    finding = done.stdout.splitlines()[0]
    for fact in ("notebooks/A.ipynb", "01-x/A.md", "(multigpu notebooks run A)"):
        assert fact in finding
    done = multigpu(pair, "run")
    assert done.returncode == 1
    assert "01-x/A.md: In [1] failed" in done.stderr and "Traceback" not in done.stderr
    done = multigpu(pair, "run", "a")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert "no notebook a" in done.stderr and "did you mean A?" in done.stderr
