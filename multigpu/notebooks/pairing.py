"""Compare a notebook with its source, and take over the source's prose."""

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.notebooks import cells, source

if TYPE_CHECKING:
    from nbformat import NotebookNode

DIFF_LINES = 12
# What a kernel reports, without the version of Python, which differs between machines.
LANGUAGE = {
    "name": "python",
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "codemirror_mode": {"name": "ipython", "version": 3},
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def select(stems: Sequence[str], root: Path) -> list[str]:
    """The given stems; without any, all stems that have a source or a notebook.

    Raises UserError for a stem that has neither.
    """
    known = source.stems(root)
    known |= {
        path.stem
        for path in (root / "notebooks").glob("*.ipynb")
        if not path.name.startswith(".")
    }
    for stem in stems:
        if stem not in known:
            similar = difflib.get_close_matches(stem, known, n=3, cutoff=0.4) or sorted(known)
            suggestion = " or ".join(similar) or "another folder"
            raise UserError(f"there is no notebook {stem}: did you mean {suggestion}?")
    return list(dict.fromkeys(stems)) or sorted(known)


def check(stems: Sequence[str] = (), root: Path | None = None) -> list[str]:
    """One message per problem; a diff if a notebook's text differs from its source's.

    The list is empty if each notebook has its source's text, every code cell was executed in
    order, and errors are only in cells whose tag announces one. Raises UserError
    for an unknown stem.
    """
    root = root or find_root()
    return [finding for stem in select(stems, root) for finding in _check_pair(stem, root)]


def _check_pair(stem: str, root: Path) -> list[str]:
    import nbformat

    path = root / "notebooks" / f"{stem}.ipynb"
    name = f"notebooks/{stem}.ipynb"
    fix = f"(multigpu notebooks run {stem})"
    try:
        markdown = source.path_of(stem, root)
        expected = source.read(markdown, root)
    except UserError as error:
        return [str(error)]
    origin = markdown.relative_to(root)
    if not path.is_file():
        return [f"{origin} has no notebook {fix}"]
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        return [f"{name} cannot be read: {cells.first_line(error)} {fix}"]
    findings = [f"{origin} {problem}" for problem in source.form_problems(expected)]
    if diff := _diff(_text_of(notebook), _text_of(expected)):
        findings.append(f"{name} does not match {origin} {fix}{diff}")
    return findings + [f"{name}: {finding} {fix}" for finding in _check_execution(notebook)]


def _check_execution(notebook: "NotebookNode") -> list[str]:
    code = cells.numbered(notebook)
    findings = []
    if unexecuted := [f"In [{n}]" for n, cell in code if cell.execution_count is None]:
        findings.append(f"not executed: {', '.join(unexecuted)}")
    for n, cell in code:
        count = cell.execution_count
        if count not in (None, n):
            # Report only the first one: the numbers after it are shifted too.
            findings.append(
                f"executed out of order: In [{count}] stands in the place of In [{n}]"
            )
            break
    for n, cell in code:
        for output in cell.outputs:
            if output.output_type == "error" and not cells.may_raise(cell):
                error = f"{output.ename}: {cells.first_line(output.evalue)}"
                findings.append(f"failed: In [{n}] has the error {error}")
        if cells.GUESS in cells.tags(cell) and (problem := cells.guess_problem(cell.source)):
            findings.append(f"In [{n}], tagged guess, {problem}")
        if comment := cells.nbval_comment(cell):
            tag = comment.lower().replace("_", "-")
            findings.append(
                f"In [{n}] has the comment {comment}, which learners would see: "
                f"give the cell the tag {tag} instead"
            )
    return findings + _check_outputs(notebook)


def _check_outputs(notebook: "NotebookNode") -> list[str]:
    """Whether the stored outputs are those that `run` has recorded."""
    recorded = notebook.metadata.get("multigpu", {}).get("outputs")
    stored = cells.output_hashes(notebook)
    if recorded is None or len(recorded) != len(stored):
        return ["no record of its outputs: it was not made by the command"]
    pairs = enumerate(zip(recorded, stored, strict=True), 1)
    changed = [f"In [{n}]" for n, (run, now) in pairs if run != now]
    if not changed:
        return []
    return [f"the stored output of {', '.join(changed)} was changed after the run"]


# ---- the text of a pair ---------------------------------------------------------------------


def from_stem(stem: str, root: Path) -> "NotebookNode":
    """The notebook of a stem without outputs, with the metadata that a stored one has.

    Raises UserError if the stem has no source, or one that cannot be read.
    """
    return with_kernel(source.read(source.path_of(stem, root), root))


def with_kernel(notebook: "NotebookNode") -> "NotebookNode":
    """The notebook with a stored one's metadata, without jupytext's."""
    kept = {key: value for key, value in notebook.metadata.items() if key != "jupytext"}
    kernel = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    notebook.metadata = type(notebook)(kept | kernel)
    return notebook


def write(notebook: "NotebookNode", path: Path) -> None:
    """Write a notebook atomically, without what differs from run to run.

    A new run then changes only the outputs.
    """
    import nbformat

    notebook.nbformat = 4
    notebook.nbformat_minor = 5
    times_seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        times = times_seen[digest] = times_seen.get(digest, 0) + 1
        cell.id = digest if times == 1 else f"{digest}-{times}"
        for key in ("execution", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
    with atomic(path) as temporary:
        temporary.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")


def update_text(stem: str, root: Path | None = None) -> bool:
    """Take over the prose and the cells' tags of a notebook's source without running it.

    The notebook keeps its outputs. Returns whether the notebook has changed. Raises UserError
    if a code cell has changed, because its output may then be another, and if the source or
    the notebook cannot be read.
    """
    import nbformat

    root = root or find_root()
    path = root / "notebooks" / f"{stem}.ipynb"
    new = from_stem(stem, root)
    try:
        before = path.read_text(encoding="utf-8")
        old = nbformat.reads(before, as_version=4)
    except Exception as error:
        raise UserError(
            f"notebooks/{stem}.ipynb cannot be read ({cells.first_line(error)}): "
            f"multigpu notebooks run {stem} makes it."
        ) from None
    stored = [cell for cell in old.cells if cell.cell_type == "code"]
    code = [cell for cell in new.cells if cell.cell_type == "code"]
    if [cell.source for cell in code] != [cell.source for cell in stored]:
        raise UserError(
            f"the code of {stem}'s source has changed, so its outputs may have: run it with "
            f"multigpu notebooks run {stem}."
        )
    for cell, kept in zip(code, stored, strict=True):
        cell.outputs = kept.outputs
        cell.execution_count = kept.execution_count
    new.metadata = old.metadata
    write(new, path)
    return path.read_text(encoding="utf-8") != before


def _text_of(notebook: "NotebookNode") -> list[str]:
    """The lines of a notebook's cells, each after its kind, tags and program."""
    lines = []
    for cell in notebook.cells:
        program = cell.metadata.get(source.PROGRAM, "")
        marks = [cell.cell_type, *cells.tags(cell), *([f"program={program}"] * bool(program))]
        lines += [f"%% {' '.join(marks)}", *cell.source.strip().splitlines()]
    return lines


def _diff(stored: list[str], wanted: list[str]) -> str:
    """A diff from a stored notebook's lines to those of its source; "" if they are equal."""
    diff = list(difflib.unified_diff(stored, wanted, "notebook", "source", lineterm="", n=1))
    if len(diff) > DIFF_LINES:
        diff[DIFF_LINES:] = [f"… {len(diff) - DIFF_LINES} more lines"]
    return "".join(f"\n    {line}" for line in diff)
