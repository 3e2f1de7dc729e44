"""Make notebooks from their scripts, and report notebooks that no longer match them.

Authors edit scripts/STEM.py (jupytext's percent format); notebooks/STEM.ipynb is the same text
with stored outputs. `run` makes the notebook from the script, `check` compares the two.
jupytext's own `--sync` is not used: it compares time stamps, which a clone does not keep, and
leaves old outputs under new code.
"""

import difflib
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.files import atomic

if TYPE_CHECKING:
    from nbformat import NotebookNode

FORMAT = "py:percent"
SECONDS_PER_CELL = 600  # a cell that hangs must not hang the run
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
RAISES_TAGS = {"raises-exception", "nbval-raises-exception"}
RAISES_COMMENT = re.compile(r"^\s*#\s*NBVAL_RAISES_EXCEPTION\s*$", re.MULTILINE)
HEADER = re.compile(r"\A(#!.*\n)?# ---\n(?:#.*\n)*?# ---\n")


class CellFailed(Exception):
    """A cell raised an exception, hung or ended its kernel.

    The text has the cell's number and first lines, and the error.
    """


def select(stems: Sequence[str], root: Path) -> list[str]:
    """The given stems; without any, all stems that have a script or a notebook.

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
            similar = difflib.get_close_matches(stem, known, n=3, cutoff=0.4) or sorted(known)
            suggestion = " or ".join(similar) or "another folder"
            raise UserError(f"there is no scripts/{stem}.py: did you mean {suggestion}?")
    return list(dict.fromkeys(stems)) or sorted(known)


def run(stem: str, root: Path | None = None) -> list[str]:
    """Execute scripts/STEM.py in a new kernel; store it with its outputs as a notebook.

    Returns remarks on the outputs, one sentence each. The notebook is written only if every
    cell succeeds. A `!command` that fails is an error too; a command that should fail ends
    with `|| true`. Raises CellFailed if a cell fails, and UserError if there is no such script
    or it cannot be read.
    """
    root = root or find_root()
    script = root / "scripts" / f"{stem}.py"
    target = root / "notebooks" / f"{stem}.ipynb"
    if not script.is_file():
        raise UserError(f"{_no_script(stem)}.")
    notebook = _from_script(script)
    target.parent.mkdir(exist_ok=True)
    _execute(notebook, stem, target.parent)
    _make_stable(notebook)
    import nbformat

    with atomic(target) as temporary:
        temporary.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")
    return [
        f"cell {number} prints this machine's own path {root}: "
        f"print a relative path, which is the same on other machines."
        for number, cell in enumerate(notebook.cells, 1)
        if str(root) in str([o for o in cell.get("outputs", []) if o.output_type != "error"])
    ]


def check(stems: Sequence[str] = (), root: Path | None = None) -> list[str]:
    """One message per problem; a diff if a notebook's source differs from its script's.

    The list is empty if each notebook has its script's text, every code cell was executed in
    order, and errors are only in cells whose tag or comment announces one. Raises UserError
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
    if not script.is_file():
        return [_no_script(stem)]
    if not path.is_file():
        return [f"scripts/{stem}.py has no notebook {fix}"]
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        # A damaged file can make nbformat raise any exception.
        return [f"{name} cannot be read: {_first_line(error)} {fix}"]
    try:
        text, as_notebook = _read_script(script)
    except UserError as error:
        return [str(error)]
    findings = []
    if diff := _differences(text, as_notebook, as_notebook):
        # Running the script does not fix this.
        findings.append(
            f"scripts/{stem}.py changes when it is converted to a notebook and back: "
            f"is a cell tagged active-ipynb, or a magic, not commented out?{diff}"
        )
    elif diff := _differences(text, as_notebook, notebook):
        findings.append(f"{name} does not match scripts/{stem}.py {fix}{diff}")
    return findings + [f"{name}: {finding} {fix}" for finding in _check_execution(notebook)]


def _no_script(stem: str) -> str:
    notebook = f"notebooks/{stem}.ipynb"
    return f"{notebook} has no script: write scripts/{stem}.py, or delete the notebook"


def _check_execution(notebook: "NotebookNode") -> list[str]:
    code = [(number, cell) for number, cell in enumerate(notebook.cells, 1) if _runs(cell)]
    findings = []
    if unexecuted := [str(number) for number, cell in code if cell.execution_count is None]:
        findings.append(f"not executed: cell {', '.join(unexecuted)}")
    for expected, (number, cell) in enumerate(code, 1):
        count = cell.execution_count
        if count not in (None, expected):
            # Report only the first one: the numbers after it are shifted too.
            findings.append(
                f"executed out of order: cell {number} has number {count}, not {expected}"
            )
            break
    for number, cell in code:
        for output in cell.outputs:
            if output.output_type == "error" and not _may_raise(cell):
                error = f"{output.ename}: {_first_line(output.evalue)}"
                findings.append(f"failed: cell {number} has the error {error}")
    return findings


def _runs(cell: "NotebookNode") -> bool:
    # Jupyter does not send an empty cell to the kernel.
    return cell.cell_type == "code" and bool(cell.source.strip())


def _may_raise(cell: "NotebookNode") -> bool:
    return bool(
        RAISES_TAGS & set(cell.metadata.get("tags", [])) or RAISES_COMMENT.search(cell.source)
    )


def _first_line(text: object) -> str:
    return next(iter(str(text).strip().splitlines()), "")


# ---- the text of a pair ---------------------------------------------------------------------


def _read_script(script: Path) -> tuple[str, "NotebookNode"]:
    import jupytext

    try:
        text = script.read_text(encoding="utf-8")
        return text, jupytext.reads(text, FORMAT)
    except Exception as error:
        # Each kind of damage raises a different exception: not UTF-8, a broken header, …
        raise UserError(
            f"scripts/{script.name} cannot be read as a notebook: {_first_line(error)}"
        ) from None


def _from_script(script: Path) -> "NotebookNode":
    _, notebook = _read_script(script)
    kept = {key: value for key, value in notebook.metadata.items() if key != "jupytext"}
    kernel = {"kernelspec": KERNEL, "language_info": LANGUAGE}
    notebook.metadata = type(notebook)(kept | kernel)
    return notebook


def _differences(text: str, as_notebook: "NotebookNode", notebook: "NotebookNode") -> str:
    """A diff of the script and the script that jupytext makes of the notebook; "" if equal.

    `as_notebook` is the script read as a notebook. Its metadata has jupytext's options; the
    notebook's metadata lacks them. Comparing texts, not cells, also finds a cell tagged
    active-ipynb that is not commented out in the script.
    """
    import jupytext

    copy = notebook.copy()
    copy.metadata = as_notebook.metadata
    written = _lines(jupytext.writes(copy, FORMAT))
    diff = list(
        difflib.unified_diff(written, _lines(text), "notebook", "script", lineterm="", n=1)
    )
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


# ---- running --------------------------------------------------------------------------------


def _execute(notebook: "NotebookNode", stem: str, folder: Path) -> None:
    import zmq
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    # Search no folders for kernelspecs: the kernel is then this Python.
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=kernels,
            # Encrypt, because other users of a cluster's node can reach the kernel's ports.
            transport_encryption="auto" if zmq.has("curve") else "disabled",
        ),
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        # Join a stream's messages: how a stream is divided into them depends on timing.
        coalesce_streams=True,
        skip_cells_with_tag="",
        # A `!command` that fails raises an exception.
        extra_arguments=["--InteractiveShell.system_raise_on_error=True"],
    )
    with client.setup_kernel(cwd=str(folder), env=_environment(), cleanup_kc=True):
        for index, cell in enumerate(notebook.cells):
            tags = cell.metadata.get("tags")
            if _may_raise(cell):
                # This is the only tag that nbclient knows.
                cell.metadata.tags = ["raises-exception"]
            problem = ""
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                problem = f"{error.ename}: {error.evalue}"
            except CellTimeoutError:
                problem = f"still running after {SECONDS_PER_CELL} s"
            except DeadKernelError:
                problem = "the kernel died"
            finally:
                cell.metadata.pop("tags", None)
                if tags is not None:
                    cell.metadata.tags = tags
            if problem:
                raise CellFailed(_failure_text(stem, index, cell, problem))


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # `!torchrun` in a cell must be this environment's, even if it is not activated.
    programs = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    # With this variable ipykernel drops what a cell's child processes print.
    environment.pop("PYTEST_CURRENT_TEST", None)
    return environment


def _failure_text(stem: str, index: int, cell: "NotebookNode", problem: str) -> str:
    source = cell.source.strip().splitlines()
    printed = "".join(output.get("text", "") for output in cell.outputs).splitlines()
    lines = [
        f"scripts/{stem}.py: cell {index + 1} failed, notebooks/{stem}.ipynb is unchanged",
        *(f"    {line}" for line in source[:4]),
    ]
    if len(source) > 4:
        lines.append("    …")
    if printed:
        lines.append("  its last output:")
        lines += [f"    {line}" for line in printed[-15:]]
    return "\n".join([*lines, f"  {problem}"])


def _make_stable(notebook: "NotebookNode") -> None:
    """Remove what differs from run to run: a new run of a script then changes only outputs."""
    notebook.nbformat = 4
    notebook.nbformat_minor = 5
    times_seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        times = times_seen[digest] = times_seen.get(digest, 0) + 1
        cell.id = digest if times == 1 else f"{digest}-{times}"
        for key in ("execution", "lines_to_next_cell"):
            cell.metadata.pop(key, None)
