"""A notebook's source: lessons/NN-slug/STEM.md, in jupytext's Markdown.

Prose is prose, a fence is a cell, and the fence has the cell's tags. A cell with a program
has no text of its own: it gets that of the functions or classes with these names in
scripts/STEM.py, or in another file of the lesson's folder.

    ```python program="train_epoch accuracy"
    ```
    ```python program="Zero1" file="zero.py"
    ```

Links in the source are relative to its folder; in the notebook, to notebooks/. A notebook
that continues a lesson is STEM_more.md, with the programs of scripts/STEM.py. The last cell,
with links to the lessons before and after, is made from the table of lessons.
"""

import ast
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import LESSONS
from multigpu.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from nbformat import NotebookNode

PROGRAM, FILE = "program", "file"
MORE = "_more"
MOST_CELLS = 30
MOST_WORDS = 1_200
MOST_FIRST_LINES = 5
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#\s])")


def path_of(stem: str, root: Path) -> Path:
    """The source of notebooks/STEM.ipynb. Raises UserError if there is none."""
    paths = sorted((root / "lessons").glob(f"[0-9]*/{stem}.md"))
    if not paths:
        raise UserError(
            f"notebooks/{stem}.ipynb has no source: write lessons/NN-slug/{stem}.md, or "
            f"delete the notebook."
        )
    return paths[0]


def stems(root: Path) -> set[str]:
    """The stems of all notebooks that have a source."""
    paths = (root / "lessons").glob("[0-9]*/[A-Z]*.md")
    return {path.stem for path in paths if path.name != "README.md"}


def read(path: Path, root: Path) -> "NotebookNode":
    """The source as a notebook: without outputs, with its programs, links and last cell.

    Raises UserError if it cannot be read, and if a program is not in the script.
    """
    import jupytext
    from nbformat.v4 import new_markdown_cell

    name = path.relative_to(root).as_posix()
    try:
        notebook = jupytext.reads(path.read_text(encoding="utf-8"), "md")
    except Exception as error:
        # Each kind of damage raises a different exception: not UTF-8, a broken header, …
        first = next(iter(str(error).strip().splitlines()), "")
        raise UserError(f"{name} cannot be read as a notebook: {first}") from None
    stem = path.stem.removesuffix(MORE)
    script = root / "scripts" / f"{stem}.py"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, posixpath.dirname(name), "notebooks")
        elif program := cell.metadata.get(PROGRAM):
            file = cell.metadata.get(FILE)
            file = path.with_name(file) if file else script
            if cell.source.strip():
                raise UserError(
                    f"{name}: the cell with the program {program} has text of its own: leave "
                    f"the cell empty, because its text is that of {file.name}."
                )
            cell.source = program_text(file, program, name)
    if links := footer(path.stem):
        notebook.cells.append(new_markdown_cell(links, metadata={"tags": ["footer"]}))
    notebook.metadata = type(notebook)()
    return notebook


def program_text(script: Path, names: str, source: str) -> str:
    """The text of functions and classes of a script, by their names, two blank lines apart.

    Raises UserError, naming the source of the notebook, for a name that the script lacks.
    """
    try:
        text = script.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, SyntaxError) as error:
        raise UserError(f"{source}: {script.name} cannot be read: {error}.") from None
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = {node.name: node for node in body if isinstance(node, kinds)}
    lines = text.splitlines()
    parts = []
    for name in names.split():
        if name not in nodes:
            hint = did_you_mean(name, nodes) or f"it has {', '.join(nodes)}."
            raise UserError(
                f"{source}: a cell has the program {name}, which {script.name} does not "
                f"define: {hint}"
            )
        node = nodes[name]
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts)


def relink(
    markdown: str, before: str, after: str, moved_files: Mapping[str, str] | None = None
) -> str:
    """The Markdown with its relative links changed from one folder to another.

    The folders, and the files that have moved to other places, are relative to the course's
    folder. Links to the web and to a place on the same page stay as they are.
    """

    def moved(match: re.Match) -> str:
        target = match[1]
        if target.startswith("/"):
            return target
        path = posixpath.normpath(posixpath.join(before, target))
        return posixpath.relpath((moved_files or {}).get(path, path), after)

    return LINK.sub(moved, markdown)


def form_problems(notebook: "NotebookNode") -> list[str]:
    """What a notebook's form has against it: too many cells or words, a long first cell."""
    problems = []
    body = [cell for cell in notebook.cells if "footer" not in cell.metadata.get("tags", [])]
    if len(body) > MOST_CELLS:
        problems.append(f"has {len(body)} cells: at most {MOST_CELLS}")
    prose = [cell.source for cell in body if cell.cell_type == "markdown"]
    words = len(" ".join(prose).split())
    if words > MOST_WORDS:
        problems.append(f"has {words:,} words of prose: at most {MOST_WORDS:,}")
    code = [cell for cell in body if cell.cell_type == "code"]
    if code and len(code[0].source.strip().splitlines()) > MOST_FIRST_LINES:
        problems.append(f"begins with more than {MOST_FIRST_LINES} lines of code")
    return problems


def footer(stem: str) -> str:
    """The links at a notebook's end; "" for one that is not in the table of lessons."""
    notebooks = [(lesson, notebook) for lesson in LESSONS for notebook in lesson.notebooks]
    places = [
        i
        for i, (_, notebook) in enumerate(notebooks)
        if notebook.stem == stem.removesuffix(MORE)
    ]
    if not places:
        return ""
    (place,) = places
    links = []
    if place:
        lesson, notebook = notebooks[place - 1]
        links.append(f"[← {lesson.number} {notebook.name}]({notebook.stem}.ipynb)")
    links.append("[syllabus](../lessons/README.md)")
    links.append(f"[page of this lesson](../lessons/{notebooks[place][0].slug}/README.md)")
    if place + 1 < len(notebooks):
        lesson, notebook = notebooks[place + 1]
        links.append(f"[{lesson.number} {notebook.name} →]({notebook.stem}.ipynb)")
    return " ·\n".join(links)
