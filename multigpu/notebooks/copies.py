"""A learner's own notebooks: my-copy/, which git ignores and no command overwrites.

my-copy/NN-slug/ has a lesson's notebooks, STEM.ipynb, without outputs and guesses, its
exercise, NN-slug.ipynb, the name under which it is handed in, and its page, README.md. Their
links lead to other copies. A page is written again by each call: it is not the learner's.
"""

import hashlib
import json
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import LESSONS, find_root
from multigpu.errors import UserError, pluralize
from multigpu.files import atomic
from multigpu.notebooks import cells, pairing, source

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = "my-copy"
INDEX = """# Your copy of the notebooks

Your guesses, changes and results stay in this folder: no command overwrites your notebooks,
and git ignores them. A lesson's page leads to your notebook and your exercise. (The links in
the syllabus lead to notebooks/, which show the results.)

| Lesson | Your notebook | Time | Exercise |
|---|---|---|---|
{rows}

A lesson from the beginning: delete or rename your notebook, then run `make my-copy`.
"""


def copy(stems: Sequence[str] = (), root: Path | None = None) -> list[str]:
    """Write the copies that do not exist yet. Returns what was done, one sentence each.

    Without stems, all notebooks and exercises are copied. A file that exists is kept, whatever
    it holds; a sentence says so if its lesson has changed since the copy was made. Raises
    UserError for an unknown stem, for a notebook that cannot be read, and if the folder cannot
    be written.
    """
    root = root or find_root()
    folder = root / FOLDER
    written = []
    kept = []
    changed = []
    try:
        folder.mkdir(exist_ok=True)
        selected = pairing.select(stems, root)
        for target, original in _copies(root).items():
            name = Path(target).stem
            if name not in selected and (stems or original.startswith("notebooks/")):
                continue
            clean = _clean_copy(original, target, root)
            if not os.path.lexists(root / target):
                (root / target).parent.mkdir(exist_ok=True)
                _write(clean, root / target)
                written.append(name)
            elif _made_from(root / target) in (None, clean.metadata.multigpu.made_from):
                kept.append(name)
            else:
                changed.append(target)
        pages = {f"{FOLDER}/README.md": _index(root)} | _pages(root)
        for target, text in pages.items():
            with atomic(root / target) as temporary:
                temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): it is the folder of your own "
            f"notebooks, so make it writable."
        ) from None
    sentences = [f"{pluralize(len(written), 'notebook')} written to {FOLDER}/"]
    if kept:
        sentences.append(f"kept as they are: {', '.join(kept)}")
    for target in changed:
        sentences.append(
            f"{target}: kept, but its lesson has changed since: for the new one, rename yours "
            f"and run this command again"
        )
    if earlier := sorted(path.name for path in folder.glob("*.ipynb")):
        sentences.append(
            f"{', '.join(earlier)} in {FOLDER}/ {'is' if len(earlier) == 1 else 'are'} of an "
            f"earlier edition and stays yours"
        )
    return sentences


def _copies(root: Path) -> dict[str, str]:
    """Each copy and what it is made from, relative to the course's folder, in its order."""
    copies = {}
    for lesson in LESSONS:
        for notebook in lesson.notebooks:
            for stem in (notebook.stem, notebook.stem + source.MORE):
                copies[f"{FOLDER}/{lesson.slug}/{stem}.ipynb"] = f"notebooks/{stem}.ipynb"
        exercise = f"lessons/{lesson.slug}/exercise.ipynb"
        copies[f"{FOLDER}/{lesson.slug}/{lesson.slug}.ipynb"] = exercise
    return {copy: original for copy, original in copies.items() if (root / original).exists()}


def _places(root: Path) -> dict[str, str]:
    """The copy of each notebook, exercise and page, by what it is made from."""
    places = {original: copy for copy, original in _copies(root).items()}
    for folder in {posixpath.dirname(copy) for copy in places.values()}:
        page = f"lessons/{posixpath.basename(folder)}/README.md"
        if (root / page).exists():
            places[page] = f"{folder}/README.md"
    return places


def _pages(root: Path) -> dict[str, str]:
    """The text of each page's copy, whose folder exists."""
    places = _places(root)
    return {
        copy: source.relink(
            (root / page).read_text(encoding="utf-8"),
            posixpath.dirname(page),
            posixpath.dirname(copy),
            places,
        )
        for page, copy in places.items()
        if page.endswith("README.md") and (root / copy).parent.is_dir()
    }


def _clean_copy(original: str, target: str, root: Path) -> "NotebookNode":
    import nbformat

    try:
        notebook = nbformat.read(root / original, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        raise UserError(
            f"{original} cannot be read ({cells.first_line(error)}): "
            f"git checkout {original} brings it back."
        ) from None
    places = _places(root)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            folders = (posixpath.dirname(original), posixpath.dirname(target))
            cell.source = source.relink(cell.source, *folders, places)
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
            if cells.GUESS in cells.tags(cell):
                cell.source = cells.without_guesses(cell.source)
    text = json.dumps([(cell.cell_type, cell.source) for cell in notebook.cells])
    made_from = hashlib.sha256(text.encode()).hexdigest()[:12]
    notebook.metadata["multigpu"] = nbformat.from_dict({"made_from": made_from})
    return notebook


def _write(notebook: "NotebookNode", target: Path) -> None:
    import nbformat

    with atomic(target) as temporary:
        temporary.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def _made_from(copy: Path) -> str | None:
    """Which version of the lesson a learner's notebook was made from; None if unknown."""
    try:
        metadata = json.loads(copy.read_text(encoding="utf-8"))["metadata"]
        return metadata["multigpu"]["made_from"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _index(root: Path) -> str:
    rows = []
    for lesson in LESSONS:
        folder = root / FOLDER / lesson.slug
        stems = [notebook.stem for notebook in lesson.notebooks]
        copies = [
            f"[{stem}]({lesson.slug}/{stem}.ipynb)"
            for stem in stems
            if (folder / f"{stem}.ipynb").exists()
        ]
        if not copies:
            continue
        has_page = (root / "lessons" / lesson.slug / "README.md").exists()
        page = f"[{lesson.title}]({lesson.slug}/README.md)" if has_page else lesson.title
        has_exercise = (folder / f"{lesson.slug}.ipynb").exists()
        exercise = f"[exercise]({lesson.slug}/{lesson.slug}.ipynb)" if has_exercise else ""
        rows.append(
            f"| {lesson.number} {page} | {', '.join(copies)} | {lesson.minutes} min "
            f"| {exercise} |"
        )
    return INDEX.format(rows="\n".join(rows))
