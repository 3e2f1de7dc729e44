"""Compare a notebook with its source, and take over the source's prose.

The source is Markdown in the lesson's folder (source.py), or in the older form the script.
"""

import difflib
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.files import atomic
from multigpu.notebooks import cells, source

if TYPE_CHECKING:
    from nbformat import NotebookNode

FORMAT = "py:percent"
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
HEADER = re.compile(r"\A(#!.*\n)?# ---\n(?:#.*\n)*?# ---\n")


def select(stems: Sequence[str], root: Path) -> list[str]:
    """The given stems; without any, all stems that have a source, a script or a notebook.

    Raises UserError for a stem that has none of them.
    """
    known = {path.stem for path in (root / "scripts").glob("*.py")} | source.stems(root)
    known |= {
        path.stem
        for path in (root / "notebooks").glob("*.ipynb")
        if not path.name.startswith(".")
    }
    for stem in stems:
        if stem not in known:
            similar = difflib.get_close_matches(stem, known, n=3, cutoff=0.4) or sorted(known)
            suggestion = " or ".join(similar) or "another folder"
            raise UserError(f"there is no scripts/{stem}.py: did you mean {suggestion}?")
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

    script = root / "scripts" / f"{stem}.py"
    path = root / "notebooks" / f"{stem}.ipynb"
    name = f"notebooks/{stem}.ipynb"
    fix = f"(multigpu notebooks run {stem})"
    markdown = source.path_of(stem, root)
    if not markdown and not script.is_file():
        return [no_script(stem)]
    if not path.is_file():
        return [f"{(markdown or script).relative_to(root)} has no notebook {fix}"]
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        return [f"{name} cannot be read: {cells.first_line(error)} {fix}"]
    try:
        if markdown:
            expected = source.read(markdown, root)
        else:
            text, as_notebook = read_script(script)
    except UserError as error:
        return [str(error)]
    findings = []
    if markdown:
        origin = markdown.relative_to(root)
        findings += [f"{origin} {problem}" for problem in source.form_problems(expected)]
        if diff := _diff(_text_of(notebook), _text_of(expected), "source"):
            findings.append(f"{name} does not match {origin} {fix}{diff}")
    elif diff := _differences(text, as_notebook, as_notebook):
        # Running the script does not fix this.
        findings.append(
            f"scripts/{stem}.py changes when it is converted to a notebook and back: "
            f"is a cell tagged active-ipynb, or a magic, not commented out?{diff}"
        )
    elif diff := _differences(text, as_notebook, notebook):
        findings.append(f"{name} does not match scripts/{stem}.py {fix}{diff}")
    return findings + [f"{name}: {finding} {fix}" for finding in _check_execution(notebook)]


def no_script(stem: str) -> str:
    """The finding that a notebook has no script."""
    notebook = f"notebooks/{stem}.ipynb"
    return f"{notebook} has no script: write scripts/{stem}.py, or delete the notebook"


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


def read_script(script: Path) -> tuple[str, "NotebookNode"]:
    """A script's text, and the notebook that jupytext reads from it.

    Raises UserError if it cannot be read.
    """
    import jupytext

    try:
        text = script.read_text(encoding="utf-8")
        return text, jupytext.reads(text, FORMAT)
    except Exception as error:
        # Each kind of damage raises a different exception: not UTF-8, a broken header, …
        raise UserError(
            f"scripts/{script.name} cannot be read as a notebook: {cells.first_line(error)}"
        ) from None


def from_stem(stem: str, root: Path) -> "NotebookNode":
    """The notebook of a stem without outputs, with the metadata that a stored one has.

    Raises UserError if the stem has no source, or one that cannot be read.
    """
    script = root / "scripts" / f"{stem}.py"
    if markdown := source.path_of(stem, root):
        return _with_kernel(source.read(markdown, root))
    if not script.is_file():
        raise UserError(f"{no_script(stem)}.")
    return from_script(script)


def from_script(script: Path) -> "NotebookNode":
    """The script as a notebook without outputs, with the metadata that a stored one has."""
    _, notebook = read_script(script)
    return _with_kernel(notebook)


def _with_kernel(notebook: "NotebookNode") -> "NotebookNode":
    kept = {key: value for key, value in notebook.metadata.items() if key != "jupytext"}
    kernel = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    notebook.metadata = type(notebook)(kept | kernel)
    return notebook


def write(notebook: "NotebookNode", path: Path) -> None:
    """Write a notebook atomically, without what differs from run to run.

    A new run of a script then changes only the outputs.
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
    if a code cell has changed, because its output may then be another, and if the script or
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


def _differences(text: str, as_notebook: "NotebookNode", notebook: "NotebookNode") -> str:
    """A diff of the script and the script that jupytext makes of the notebook; "" if equal.

    `as_notebook` is the script read as a notebook. Its metadata has jupytext's options; the
    notebook's metadata lacks them. Comparing texts, not cells, also finds a cell tagged
    active-ipynb that is not commented out in the script.
    """
    import jupytext

    copy = notebook.copy()
    copy.metadata = as_notebook.metadata
    return _diff(_lines(jupytext.writes(copy, FORMAT)), _lines(text), "script")


def _text_of(notebook: "NotebookNode") -> list[str]:
    """The lines of a notebook's cells, each after its kind, tags and program."""
    lines = []
    for cell in notebook.cells:
        program = cell.metadata.get(source.PROGRAM, "")
        marks = [cell.cell_type, *cells.tags(cell), *([f"program={program}"] * bool(program))]
        lines += [f"%% {' '.join(marks)}", *cell.source.strip().splitlines()]
    return lines


def _diff(stored: list[str], wanted: list[str], origin: str) -> str:
    """A diff from a stored notebook's lines to those of its source; "" if they are equal."""
    diff = list(difflib.unified_diff(stored, wanted, "notebook", origin, lineterm="", n=1))
    if len(diff) > DIFF_LINES:
        diff[DIFF_LINES:] = [f"… {len(diff) - DIFF_LINES} more lines"]
    return "".join(f"\n    {line}" for line in diff)


def _lines(text: str) -> list[str]:
    """The lines to compare: without the header, and without blank lines around a cell."""
    lines = []
    for line in HEADER.sub(r"\1", text).strip().splitlines():
        if line.startswith("# %%"):
            while lines and not lines[-1].strip():
                lines.pop()
        if line.strip() or (lines and not lines[-1].startswith("# %%")):
            lines.append(line)
    return lines
