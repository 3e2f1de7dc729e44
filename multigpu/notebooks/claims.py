"""lessons/claims.md: what the textbooks say and what the lessons measured, on one page.

Each row is a claim in a stored output of a notebook (`lesson.claim`), so a figure on the page
has one source, and the page is made again after a notebook has been.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import LESSONS, find_root
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.lesson.claims import METADATA
from multigpu.notebooks import cells, source

if TYPE_CHECKING:
    from nbformat import NotebookNode

PAGE = "lessons/claims.md"
INTRODUCTION = """\
# What the textbooks say, and what we saw

Each row is an output of a notebook's cell. “Simulated” times are those of virtual GPUs
([what they are worth](virtual.md)); “measured” ones are of this course's machine, mostly two
CPU cores. An answer holds for what its row names: model, number of ranks, link. This page has
the answers to the lessons' guesses: read it after them.
`multigpu notebooks claims` writes it.
"""


def write(root: Path | None = None) -> bool:
    """Write lessons/claims.md from the stored outputs; return whether it has changed.

    Raises UserError for a notebook that cannot be read.
    """
    root = root or find_root()
    path = root / PAGE
    text = page(root)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return True


def check(root: Path | None = None) -> list[str]:
    """A finding if lessons/claims.md is not what the stored outputs give."""
    root = root or find_root()
    path = root / PAGE
    stored = path.read_text(encoding="utf-8") if path.exists() else f"{INTRODUCTION}\n"
    if stored == page(root):
        return []
    return [f"{PAGE} is not what the notebooks' outputs give (multigpu notebooks claims)"]


def page(root: Path) -> str:
    """The text of lessons/claims.md."""
    parts = [INTRODUCTION]
    for lesson in LESSONS:
        rows = []
        for notebook in lesson.notebooks:
            for stem in (notebook.stem, notebook.stem + source.MORE):
                path = root / "notebooks" / f"{stem}.ipynb"
                if path.exists():
                    rows += _rows(path)
        if rows:
            parts.append(
                f"## [{lesson.name}]({lesson.slug}/README.md)\n\n"
                "| The textbooks say | We saw | Where |\n|---|---|---|\n" + "\n".join(rows)
            )
    return "\n".join(parts) + "\n"


def _rows(path: Path) -> Iterator[str]:
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        raise UserError(f"{path} cannot be read: {cells.first_line(error)}.") from None
    for heading, n, claim in _claims(notebook):
        anchor = f"#{heading.replace(' ', '-')}" if heading else ""
        where = f"[{path.stem}, In \\[{n}\\]](../notebooks/{path.name}{anchor})"
        says, holds, because = (
            claim[name].replace("|", r"\|").replace("\n", " ")
            for name in ("says", "holds", "because")
        )
        yield f"| {says} | {holds[:1].upper()}{holds[1:]}: {because} | {where} |"


def _claims(notebook: "NotebookNode") -> Iterator[tuple[str, int, dict[str, str]]]:
    """Each claim with the heading above it, and its cell's number."""
    heading, n = "", 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if line.startswith("#")]
            heading = lines[-1].lstrip("# ") if lines else heading
        elif cell.cell_type == "code" and cell.source.strip():
            n += 1
            for output in cell.outputs:
                if claim := output.get("metadata", {}).get(METADATA):
                    yield heading, n, claim
