"""A learner's copies have no outputs and no guesses, run in their place, and stay theirs."""

import json
import re
import subprocess

import nbformat
import pytest
from commands import ROOT
from nbformat import v4

from multigpu.errors import UserError
from multigpu.notebooks import copies
from multigpu.notebooks.cells import without_guesses

ONE = "my-copy/01-one-gpu/PT_CNN_SingleGPU.ipynb"
TWO = "my-copy/02-data-parallel/PT_CNN_DataParallel.ipynb"
GUESS = """\
guess_speedup = 1.8  # times as fast, at a batch of 64
guess_where = (
    "GPU 0"  # é: two bytes
)
guess_é = -3  # below 0
"""


def notebook(guess: str = GUESS) -> nbformat.NotebookNode:
    output = v4.new_output("stream", text="2\n")
    cells = [
        v4.new_markdown_cell("# A lesson"),
        v4.new_code_cell(guess, metadata={"tags": ["active-ipynb", "guess"]}),
        v4.new_code_cell("print(2)", outputs=[output], execution_count=2),
    ]
    return v4.new_notebook(cells=cells, metadata={"multigpu": {"outputs": ["a", "b"]}})


@pytest.fixture
def course(tmp_path):
    for name in ("scripts", "notebooks"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyproject.toml").touch()
    for stem in ("PT_CNN_SingleGPU", "PT_CNN_DataParallel"):
        nbformat.write(notebook(), tmp_path / "notebooks" / f"{stem}.ipynb")
    return tmp_path


def test_a_copy_has_no_outputs_and_no_guesses(course):
    copies.copy(root=course)
    copy = nbformat.read(course / ONE, as_version=4)
    nbformat.validate(copy)
    _, guess, experiment = copy.cells
    assert guess.source == without_guesses(GUESS)
    assert experiment.source == "print(2)"
    assert experiment.outputs == [] and experiment.execution_count is None


def test_each_guess_becomes_none_and_keeps_its_comment():
    text = without_guesses(GUESS)
    names: dict = {}
    exec(text, names)
    assert [names[name] for name in ("guess_speedup", "guess_where", "guess_é")] == [None] * 3
    assert "guess_speedup = None  # times as fast, at a batch of 64\n" in text
    assert "guess_é = None  # below 0\n" in text


def test_a_learners_notebook_is_never_overwritten(course):
    copies.copy(root=course)
    own = course / ONE
    own.write_text(own.read_text().replace("guess_speedup = None", "guess_speedup = 4"))
    before = own.read_bytes()
    (course / TWO).unlink()
    first, kept = copies.copy(root=course)
    assert "1 notebook written" in first and "PT_CNN_SingleGPU" in kept
    assert own.read_bytes() == before
    assert (course / TWO).exists()


def test_a_lesson_that_has_changed_is_named(course):
    copies.copy(root=course)
    own = course / ONE
    before = own.read_bytes()
    lesson = course / "notebooks" / "PT_CNN_SingleGPU.ipynb"
    changed = notebook()
    changed.cells[2].outputs = []  # a new run of the same lesson is no change for a learner
    nbformat.write(changed, lesson)
    assert not any("has changed" in sentence for sentence in copies.copy(root=course))
    changed.cells[0].source = "# A better lesson"
    nbformat.write(changed, lesson)
    (sentence,) = (s for s in copies.copy(root=course) if "has changed" in s)
    assert ONE in sentence and "rename" in sentence
    assert own.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metadata": 3}'])
def test_a_file_of_the_learners_that_is_no_notebook_is_kept(course, text):
    own = course / ONE
    own.parent.mkdir(parents=True)
    own.write_text(text)
    assert any("kept" in sentence for sentence in copies.copy(root=course))
    assert own.read_text() == text


def test_what_cannot_be_written_or_read_is_one_sentence(course):
    (course / "my-copy").write_text("a file")
    with pytest.raises(UserError, match="my-copy"):
        copies.copy(root=course)
    (course / "my-copy").unlink()
    (course / "notebooks" / "PT_CNN_SingleGPU.ipynb").write_text("{")
    with pytest.raises(UserError, match=r"PT_CNN_SingleGPU\.ipynb cannot be read"):
        copies.copy(root=course)
    with pytest.raises(UserError, match="did you mean"):
        copies.copy(["PT_CNN_SingleGPUs"], root=course)


# ---- the course's ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The copies of the course's notebooks, in a folder with links to the course's others."""
    root = tmp_path_factory.mktemp("course")
    for path in ROOT.iterdir():
        if path.name != "my-copy":
            (root / path.name).symlink_to(path)
    copies.copy(root=root)
    return root


def test_links_in_notebooks_and_copies_work(copied):
    found = 0
    for folder in ("notebooks", "my-copy"):
        files = [path for path in (copied / folder).rglob("*") if "results" not in path.parts]
        for path in (path for path in files if path.suffix in (".ipynb", ".md")):
            texts = [path.read_text()]
            if path.suffix == ".ipynb":
                cells = json.loads(texts[0])["cells"]
                texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
            for link in re.findall(r"\]\(([^)#\s]+)", "\n".join(texts)):
                found += 1
                assert "://" in link or (path.parent / link).exists(), f"{path.name}: {link}"
    assert found > 100


def test_make_lab_makes_the_copies_first():
    done = subprocess.run(
        ["make", "--dry-run", "lab"], cwd=ROOT, capture_output=True, text=True
    )
    copy, lab = (
        done.stdout.find(words) for words in ("notebooks copy", "jupyterlab --config")
    )
    assert -1 < copy < lab


def test_exercises_are_copied_under_the_name_that_is_handed_in(course):
    folder = course / "lessons" / "01-one-gpu"
    folder.mkdir(parents=True)
    nbformat.write(notebook(), folder / "exercise.ipynb")

    copies.copy(root=course)

    path = course / "my-copy" / "01-one-gpu" / "01-one-gpu.ipynb"
    copy = nbformat.read(path, as_version=4)
    assert copy.cells[2].source == "print(2)" and copy.cells[2].outputs == []
    index = (course / "my-copy" / "README.md").read_text()
    assert "[exercise](01-one-gpu/01-one-gpu.ipynb)" in index
    assert "[exercise](02" not in index
