"""How do notebooks stay true to their scripts? Run each script into its notebook, and tell where a pair differs.

scripts/STEM.py is what an author edits (jupytext's percent format); notebooks/STEM.ipynb is the same text with stored
outputs. `run` makes the notebook from the script, `check` compares the two. jupytext's own `--sync` is not used:
it goes by time stamps, which a clone does not keep, and leaves old outputs under new code.
"""

import difflib
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.errors import UserError
from multigpu.files import atomic

if TYPE_CHECKING:
    from nbformat import NotebookNode

FORMAT = "py:percent"
SECONDS_PER_CELL = 600  # a training that hangs must not hang the run
DIFF_LINES = 12
LANGUAGE = {  # what a kernel reports, without the version of Python, which differs from machine to machine
    "name": "python",
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "codemirror_mode": {"name": "ipython", "version": 3},
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
RAISES_TAGS = {"raises-exception", "nbval-raises-exception"}
RAISES_COMMENT = re.compile(r"^\s*#\s*NBVAL_RAISES_EXCEPTION\s*$", re.MULTILINE)
HEADER = re.compile(r"\A(#!.*\n)?# ---\n(?:#.*\n)*?# ---\n")


class CellFailed(Exception):
    """A cell raised, hung or killed its kernel; the text says which cell, its first lines and the error."""


def find_root() -> Path:
    """Give the course's folder: the working directory or one above it, else the one that the package lies in.

    Raises UserError if none of them holds scripts/.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if (folder / "scripts").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise UserError(
        f"{here} is not in the course's folder, which holds scripts/ and notebooks/: change to it first."
    )


def select(stems: Sequence[str], root: Path) -> list[str]:
    """Give the stems asked for, or all that have a script or a notebook if none is asked for.

    Raises UserError for a stem that has neither.
    """
    known = {path.stem for path in (root / "scripts").glob("*.py")}
    known |= {
        path.stem
        for path in (root / "notebooks").glob("*.ipynb")
        if not path.name.startswith(".")
    }
    for stem in stems:
        if stem not in known:
            near = difflib.get_close_matches(stem, known, n=3, cutoff=0.4) or sorted(known)
            raise UserError(
                f"there is no scripts/{stem}.py: did you mean {' or '.join(near) or 'another folder'}?"
            )
    return list(dict.fromkeys(stems)) or sorted(known)


def run(stem: str, root: Path | None = None) -> list[str]:
    """Execute scripts/STEM.py in a fresh kernel and store it, with its outputs, as notebooks/STEM.ipynb.

    Gives remarks on the outputs, one sentence each. The notebook is written only if every cell succeeded.
    In a cell, `!command` that fails is an error too, as a stored failure would pass for a lesson; a command that is
    meant to fail ends with `|| true`.
    Raises CellFailed, and UserError if there is no such script or it cannot be read.
    """
    root = root or find_root()
    script, target = root / "scripts" / f"{stem}.py", root / "notebooks" / f"{stem}.ipynb"
    if not script.is_file():
        raise UserError(
            f"notebooks/{stem}.ipynb has no script: write scripts/{stem}.py, or delete the notebook."
        )
    notebook = _from_script(script)
    target.parent.mkdir(exist_ok=True)
    _execute(notebook, stem, target.parent)
    _make_stable(notebook)
    import nbformat

    with atomic(target) as temporary:
        temporary.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")
    return [
        f"cell {number} prints this machine's own path {root}: print a relative one, other machines differ."
        for number, cell in enumerate(notebook.cells, 1)
        if str(root) in str([o for o in cell.get("outputs", []) if o.output_type != "error"])
    ]


def check(stems: Sequence[str] = (), root: Path | None = None) -> list[str]:
    """Say what is wrong with the pairs: one text each, its first line the finding, a short diff below where it helps.

    An empty list: each script and its notebook hold the same text, and every code cell of the notebook was executed,
    in order, without an error that it does not announce. Raises UserError for an unknown stem.
    """
    root = root or find_root()
    return [finding for stem in select(stems, root) for finding in _check_pair(stem, root)]


def _check_pair(stem: str, root: Path) -> list[str]:
    import nbformat

    script, path = root / "scripts" / f"{stem}.py", root / "notebooks" / f"{stem}.ipynb"
    name, mend = f"notebooks/{stem}.ipynb", f"(multigpu notebooks run {stem})"
    if not script.is_file():
        return [f"{name} has no script: write scripts/{stem}.py, or delete the notebook"]
    if not path.is_file():
        return [f"scripts/{stem}.py has no notebook {mend}"]
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (
        Exception
    ) as error:  # whatever is in the file, it is a finding: nbformat lets many kinds through
        return [f"{name} cannot be read: {_first_line(error)} {mend}"]
    try:
        text, own = _read_script(script)
    except UserError as error:
        return [str(error)]
    findings = []
    if diff := _differences(text, own, own):
        # Running the script cannot mend this one.
        what = "a cell tagged active-ipynb or a magic that is not commented out?"
        findings.append(
            f"scripts/{stem}.py reads otherwise after the way to a notebook and back: {what}{diff}"
        )
    elif diff := _differences(text, own, notebook):
        findings.append(f"{name} is not in step with scripts/{stem}.py {mend}{diff}")
    return findings + [f"{name}: {finding} {mend}" for finding in _check_execution(notebook)]


def _check_execution(notebook: "NotebookNode") -> list[str]:
    code = [(number, cell) for number, cell in enumerate(notebook.cells, 1) if _runs(cell)]
    findings = []
    if unexecuted := [str(number) for number, cell in code if cell.execution_count is None]:
        findings.append(f"not executed: cell {', '.join(unexecuted)}")
    for place, (number, cell) in enumerate(code, 1):
        if cell.execution_count not in (None, place):
            # The first one says it all: those after it are shifted too.
            findings.append(
                f"executed out of order: cell {number} has number {cell.execution_count}, not {place}"
            )
            break
    for number, cell in code:
        for output in cell.outputs:
            if output.output_type == "error" and not _may_raise(cell):
                findings.append(
                    f"failed: cell {number} holds {output.ename}: {_first_line(output.evalue)}"
                )
    return findings


def _runs(cell: "NotebookNode") -> bool:
    return cell.cell_type == "code" and bool(
        cell.source.strip()
    )  # a kernel never gets an empty cell


def _may_raise(cell: "NotebookNode") -> bool:
    return bool(
        RAISES_TAGS & set(cell.metadata.get("tags", [])) or RAISES_COMMENT.search(cell.source)
    )


def _first_line(text: object) -> str:
    return next(iter(str(text).strip().splitlines()), "")


# ---- the text of a pair ------------------------------------------------------------------------------------------


def _read_script(script: Path) -> tuple[str, "NotebookNode"]:
    import jupytext

    try:
        text = script.read_text(encoding="utf-8")
        return text, jupytext.reads(text, FORMAT)
    except (
        Exception
    ) as error:  # not UTF-8, or a broken header: each has an exception of its own
        raise UserError(
            f"scripts/{script.name} cannot be read as a notebook: {_first_line(error)}"
        ) from None


def _from_script(script: Path) -> "NotebookNode":
    _, notebook = _read_script(script)
    own = {key: value for key, value in notebook.metadata.items() if key != "jupytext"}
    notebook.metadata = type(notebook)(own | {"kernelspec": KERNEL, "language_info": LANGUAGE})
    return notebook


def _differences(text: str, own: "NotebookNode", notebook: "NotebookNode") -> str:
    """Compare the script with what jupytext would write for the notebook; '' if they are the same text.

    `own` is the script read as a notebook: its header holds jupytext's options, which the notebook's lacks.
    Comparing the texts, not the cells, also finds a cell tagged active-ipynb that is not commented out in the script.
    """
    import jupytext

    twin = notebook.copy()
    twin.metadata = own.metadata
    there, here = _lines(jupytext.writes(twin, FORMAT)), _lines(text)
    diff = list(difflib.unified_diff(there, here, "notebook", "script", lineterm="", n=1))
    if len(diff) > DIFF_LINES:
        diff[DIFF_LINES:] = [f"… {len(diff) - DIFF_LINES} more lines"]
    return "".join(f"\n    {line}" for line in diff)


def _lines(text: str) -> list[str]:
    """The lines that count: no header, and no blank lines around a cell's first and last line."""
    lines = []
    for line in HEADER.sub(r"\1", text).strip().splitlines():
        if line.startswith("# %%"):
            while lines and not lines[-1].strip():
                lines.pop()
        if line.strip() or (lines and not lines[-1].startswith("# %%")):
            lines.append(line)
    return lines


# ---- running -----------------------------------------------------------------------------------------------------


def _execute(notebook: "NotebookNode", stem: str, folder: Path) -> None:
    import zmq
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    # No folders to look in: then the kernel is this very Python, whatever kernelspecs the user has installed.
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=kernels,
            # Other users of a cluster's node can reach the kernel's ports, too.
            transport_encryption="auto" if zmq.has("curve") else "disabled",
        ),
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        coalesce_streams=True,  # where a stream is cut into messages depends on timing
        skip_cells_with_tag="",
        extra_arguments=[
            "--InteractiveShell.system_raise_on_error=True"
        ],  # `!command` that fails
    )
    with client.setup_kernel(cwd=str(folder), env=_environment(), cleanup_kc=True):
        for index, cell in enumerate(notebook.cells):
            tags = cell.metadata.get("tags")
            if _may_raise(cell):
                cell.metadata.tags = ["raises-exception"]  # the one mark that nbclient knows
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                raise CellFailed(
                    _story(stem, index, cell, f"{error.ename}: {error.evalue}")
                ) from None
            except CellTimeoutError:
                raise CellFailed(
                    _story(stem, index, cell, f"still running after {SECONDS_PER_CELL} s")
                ) from None
            except DeadKernelError:
                raise CellFailed(_story(stem, index, cell, "the kernel died")) from None
            finally:
                cell.metadata.pop("tags", None)
                if tags is not None:
                    cell.metadata.tags = tags


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # `!torchrun` in a cell must be this environment's, also where it was not activated.
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    # While it is set, ipykernel drops what a cell's child processes print.
    environment.pop("PYTEST_CURRENT_TEST", None)
    return environment


def _story(stem: str, index: int, cell: "NotebookNode", error: str) -> str:
    source = cell.source.strip().splitlines()
    printed = "".join(output.get("text", "") for output in cell.outputs).splitlines()
    lines = [
        f"scripts/{stem}.py: cell {index + 1} failed, notebooks/{stem}.ipynb stays as it was"
    ]
    lines += [f"    {line}" for line in source[:4]] + ["    …"] * (len(source) > 4)
    lines += ["  printed last:"] * bool(printed) + [f"    {line}" for line in printed[-15:]]
    return "\n".join([*lines, f"  {error}"])


def _make_stable(notebook: "NotebookNode") -> None:
    """Drop what differs from run to run, so that running an unchanged script changes nothing but its outputs."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        for key in ("execution", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
