"""A learner's own notebooks: my-copy/, which git ignores and no command overwrites.

STEM.ipynb is a lesson's notebook, SLUG.ipynb its exercise. A copy has neither outputs nor
guesses. It lies as deep as notebooks/, so that the same relative links and commands work; its
results go to my-copy/results.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import LESSONS, find_root
from multigpu.errors import UserError, pluralize
from multigpu.files import atomic
from multigpu.notebooks import cells, pairing

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = "my-copy"
INDEX = """# Your copy of the notebooks

Your guesses, changes and results stay in this folder: no command overwrites them, and git
ignores them. Open a lesson's page, then its notebook here. (The links on pages and in the
syllabus lead to notebooks/, which show the results.)

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
        sources = {s: f"notebooks/{s}.ipynb" for s in pairing.select(stems, root)}
        if not stems:
            sources |= _exercises(root)
        for stem, source in sources.items():
            clean = _clean_copy(source, root)
            target = folder / f"{stem}.ipynb"
            if not os.path.lexists(target):
                _write(clean, target)
                written.append(stem)
            elif _made_from(target) in (None, clean.metadata.multigpu.made_from):
                kept.append(stem)
            else:
                changed.append(stem)
        with atomic(folder / "README.md") as temporary:
            temporary.write_text(_index(root), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror}): it is the folder of your own "
            f"notebooks, so make it writable."
        ) from None
    sentences = [f"{pluralize(len(written), 'notebook')} written to {FOLDER}/"]
    if kept:
        sentences.append(f"kept as they are: {', '.join(kept)}")
    for stem in changed:
        sentences.append(
            f"{FOLDER}/{stem}.ipynb: kept, but its lesson has changed since: for the new one, "
            f"rename yours and run this command again"
        )
    return sentences


def _exercises(root: Path) -> dict[str, str]:
    """The exercise of each lesson that has one, by slug."""
    paths = {lesson.slug: f"lessons/{lesson.slug}/exercise.ipynb" for lesson in LESSONS}
    return {slug: path for slug, path in paths.items() if (root / path).exists()}


def _clean_copy(source: str, root: Path) -> "NotebookNode":
    import nbformat

    try:
        notebook = nbformat.read(root / source, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        raise UserError(
            f"{source} cannot be read ({cells.first_line(error)}): "
            f"git checkout {source} brings it back."
        ) from None
    for cell in notebook.cells:
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
        stems = [one.stem for one in lesson.notebooks]
        copies = [f"[{stem}]({stem}.ipynb)" for stem in stems]
        if not any((root / FOLDER / f"{s}.ipynb").exists() for s in stems):
            continue
        page = f"[{lesson.title}](../lessons/{lesson.slug}/README.md)"
        has_exercise = (root / FOLDER / f"{lesson.slug}.ipynb").exists()
        exercise = f"[exercise]({lesson.slug}.ipynb)" if has_exercise else ""
        rows.append(
            f"| {lesson.number} {page} | {', '.join(copies)} | {lesson.minutes} min "
            f"| {exercise} |"
        )
    return INDEX.format(rows="\n".join(rows))
