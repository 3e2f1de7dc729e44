"""A lesson's kernel: its imports, and errors of cells that are one sentence."""

import linecache
import multiprocessing
import os
import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from multigpu.course import find_root
from multigpu.errors import Interrupted, UserError, did_you_mean
from multigpu.launch import prefork
from multigpu.launch.spawning import end_processes
from multigpu.lesson.guesses import GuessNeeded
from multigpu.lesson.interrupts import deferred
from multigpu.lesson.shell_commands import CommandFailed, run

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def setup(slug: str, *, ranks: bool = False) -> None:
    """Prepare this process for the lesson in lessons/SLUG, in the notebook's first cell.

    `from experiments import …` then imports lessons/SLUG/experiments.py. In IPython the
    working directory is notebooks/, wherever the notebook lies (`open_lesson` then changes it
    to the course's folder). A `!command` that fails raises
    an error, so that the cells below do not run; an interrupted one ends with all processes
    that it started; and a NameError, or a missing file whose path is relative, says that a
    cell above may not have run. With `ranks`, for a notebook that uses `launch.call`, a server
    is started whose forks are the ranks, so that they start faster. Outside IPython only the
    import is prepared. A second call changes nothing.

    Raises UserError if there is no such lesson.
    """
    folders = {
        path.parent.name: path.parent for path in find_root().glob("lessons/*/README.md")
    }
    if slug not in folders:
        hint = did_you_mean(slug, folders) or f"expected one of {', '.join(sorted(folders))}."
        raise UserError(f"there is no lesson lessons/{slug}: {hint}")
    folder = str(folders[slug])
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if shell := get_ipython():
            os.chdir(folders[slug].parents[1] / "notebooks")
            _prepare(shell)
            if ranks:
                prefork.start_server()


def _prepare(shell: "InteractiveShell") -> None:
    from subprocess import CalledProcessError

    def system(command: str) -> None:
        # `depth` counts the frames from var_expand to the cell, whose {names} it replaces.
        code = run(shell.var_expand(command, depth=1))
        shell.user_ns["_exit_code"] = code
        if code:
            raise CommandFailed(code)

    shell.system = system
    shell.system_raise_on_error = True  # for `lines = !command`, which IPython runs itself
    # ipykernel sets its own handler of SIGINT before each cell.
    shell.events.register("pre_run_cell", deferred.install)
    shell.events.register("pre_run_cell", _remember_processes)
    kinds = (NameError, FileNotFoundError, CalledProcessError, KeyboardInterrupt)
    shell.set_custom_exc(kinds, _show)


def _show(
    shell: "InteractiveShell",
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Show a cell's error: in one sentence if that is enough, else with its traceback."""
    shown: BaseException
    if isinstance(error, KeyboardInterrupt):
        shown = _end_processes() or error
    elif isinstance(error, FileNotFoundError):
        shown = error
        if _is_a_cells(trace, shell) and _is_relative(error.filename):
            shown = UserError(
                f"there is no file {error.filename}. If a cell above writes it, run that one "
                f"first: Run > Run All Above Selected Cell."
            )
    elif not isinstance(error, NameError):
        # Of `lines = !command` IPython prints nothing.
        shown = UserError(f"{error} Run it without `lines =` to see why.")
    elif str(error.name).startswith("guess"):
        shown = GuessNeeded(
            f"No guess yet: run the cell above that assigns {error.name}, then this one."
        )
    elif guess := _assigned_guess(trace):
        shown = GuessNeeded(
            f"{error.name} is not defined. If your answer is a text, write it in quotes, "
            f'{guess} = "{error.name}", then run this cell again.'
        )
    else:
        shown = error
        if _is_a_cells(trace, shell):
            error.add_note(
                f"If a cell above defines {error.name}, run that one first: "
                f"Run > Run All Above Selected Cell."
            )
    shell.showtraceback((type(shown), shown, trace), tb_offset=tb_offset)


_before_the_cell: set[multiprocessing.process.BaseProcess] = set()


def _remember_processes(*_: object) -> None:
    """Remember which processes ran before the cell."""
    _before_the_cell.clear()
    _before_the_cell.update(multiprocessing.active_children())


def _end_processes() -> Interrupted | None:
    """End the ranks that the interrupted cell started; the error to show if there are any."""
    # The workers of a DataLoader are daemons: the next cell may still read from them.
    new = set(multiprocessing.active_children()) - _before_the_cell
    ranks = [process for process in new if not process.daemon]
    if not ranks:
        return None
    end_processes(ranks)
    return Interrupted(
        f"Interrupted: the processes that this cell started ({len(ranks)}) have ended. "
        f"Run it again, or go on."
    )


def _assigned_guess(trace: TracebackType | None) -> str | None:
    """The name of the guess that the line which raised the error assigns, or None."""
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None:
        return None
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    assignment = re.match(r"(guess\w*)\s*=[^=]", line)
    return assignment[1] if assignment else None


def _is_a_cells(trace: TracebackType | None, shell: "InteractiveShell") -> bool:
    """Whether a cell's code raised the error, itself or in a call that opens a file."""
    raised_in: dict[str, object] = {}
    while trace:
        frame = trace.tb_frame.f_globals
        # IPython has its own `open`, which a cell calls.
        if frame.get("__name__", "").partition(".")[0] not in ("pathlib", "IPython", "io"):
            raised_in = frame
        trace = trace.tb_next
    return raised_in is shell.user_global_ns


def _is_relative(name: object) -> bool:
    return isinstance(name, str | os.PathLike) and not os.path.isabs(name)
