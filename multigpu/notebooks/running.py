"""Execute a notebook's source, and store the notebook with its outputs."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from multigpu.course import find_root
from multigpu.errors import UserError
from multigpu.notebooks import cells, pairing, source

if TYPE_CHECKING:
    from nbformat import NotebookNode

SECONDS_PER_CELL = 600  # a cell that hangs must not hang the run


class CellFailed(Exception):
    """A cell raised an exception, hung or ended its kernel.

    The text has the cell's number and first lines, and the error.
    """


def run(stem: str, root: Path | None = None) -> list[str]:
    """Execute a stem's source in a new kernel; store notebooks/STEM.ipynb with its outputs.

    Returns remarks on the outputs, one sentence each. Raises CellFailed if a cell fails, and
    UserError if there is no such source or it cannot be read.
    """
    root = root or find_root()
    target = root / "notebooks" / f"{stem}.ipynb"
    notebook = pairing.from_stem(stem, root)
    target.parent.mkdir(exist_ok=True)
    return _run(notebook, source.path_of(stem, root), target, root)


def run_script(script: Path, target: Path, root: Path) -> list[str]:
    """Execute an exercise's script, in jupytext's percent format; store it as `target`.

    Returns remarks on the outputs, one sentence each. The notebook is written only if every
    cell succeeds. A `!command` that fails is an error too; a command that should fail ends
    with `|| true`. Raises CellFailed if a cell fails, and UserError if the script cannot be
    read.
    """
    import jupytext

    try:
        notebook = jupytext.reads(script.read_text(encoding="utf-8"), "py:percent")
    except Exception as error:
        # Each kind of damage raises a different exception: not UTF-8, a broken header, …
        raise UserError(
            f"{script.relative_to(root)} cannot be read as a notebook: "
            f"{cells.first_line(error)}"
        ) from None
    return _run(pairing.with_kernel(notebook), script, target, root)


def _run(notebook: "NotebookNode", origin: Path, target: Path, root: Path) -> list[str]:
    _execute(notebook, f"{origin.relative_to(root)}", target)
    notebook.metadata["multigpu"] = {"outputs": cells.output_hashes(notebook)}
    pairing.write(notebook, target)
    return [
        f"In [{n}] prints this machine's own path {root}: "
        f"print a relative path, which is the same on other machines."
        for n, cell in cells.numbered(notebook)
        if str(root) in str([o for o in cell.outputs if o.output_type != "error"])
    ]


def _execute(notebook: "NotebookNode", script: str, target: Path) -> None:
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    # Search no folders for kernelspecs: the kernel is then this Python.
    kernels = KernelSpecManager(kernel_dirs=[])
    # Unix sockets in a private folder: other users of a cluster's node can reach TCP ports,
    # and another program can take a free port before the kernel does.
    sockets = tempfile.TemporaryDirectory()
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=kernels,
            transport="ipc",
            ip=f"{sockets.name}/kernel",
        ),
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        # Join a stream's messages: how a stream is divided into them depends on timing.
        coalesce_streams=True,
        skip_cells_with_tag="",
        # A `!command` that fails raises an exception.
        extra_arguments=["--InteractiveShell.system_raise_on_error=True"],
    )
    kernel = client.setup_kernel(cwd=str(target.parent), env=_environment(), cleanup_kc=True)
    with sockets, kernel:
        for index, cell in enumerate(notebook.cells):
            tags = cell.metadata.get("tags")
            if cells.may_raise(cell):
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
                raise CellFailed(_failure_text(script, target.name, notebook, cell, problem))


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # `!torchrun` in a cell must be this environment's, even if it is not activated.
    programs = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", os.defpath)])
    # With this variable ipykernel drops what a cell's child processes print.
    environment.pop("PYTEST_CURRENT_TEST", None)
    return environment


def _failure_text(
    script: str, target: str, notebook: "NotebookNode", failed: "NotebookNode", problem: str
) -> str:
    (n,) = [n for n, cell in cells.numbered(notebook) if cell is failed]
    source = failed.source.strip().splitlines()
    printed = "".join(output.get("text", "") for output in failed.outputs).splitlines()
    lines = [
        f"{script}: In [{n}] failed, {target} is unchanged",
        *(f"    {line}" for line in source[:4]),
    ]
    if len(source) > 4:
        lines.append("    …")
    if printed:
        lines.append("  its last output:")
        lines += [f"    {line}" for line in printed[-15:]]
    return "\n".join([*lines, f"  {problem}"])
