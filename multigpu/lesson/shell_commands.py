"""Run a cell's `!command` in a terminal of its own; an interrupt ends all that it started."""

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from multigpu.errors import Interrupted, UserError

if TYPE_CHECKING:
    import pexpect
    import psutil

# torchrun forwards the interrupt to its ranks, and a rank may write a checkpoint first.
SECONDS_TO_END = 10.0


class CommandFailed(UserError):
    """A `!command` ended with an exit code other than 0."""

    def __init__(self, code: int):
        ending = f"exit code {code}" if code > 0 else f"signal {-code}"
        super().__init__(
            f"the command ended with {ending}: its last lines say why. The cells below need "
            f"it."
        )


def run(command: str) -> int:
    """Run a command of the shell to its end, and print what it prints. Returns its exit code.

    The code is negative if a signal ended the command. The command has a terminal, as in
    IPython, so that programs print at once. If the cell is interrupted, so is the command;
    processes that still run SECONDS_TO_END later, or at a second interrupt, are killed.

    Raises Interrupted after an interrupt, and UserError if the command ends in `&`.
    """
    import pexpect

    if command.rstrip().endswith("&"):
        raise UserError(
            "a notebook waits for its !commands, and cannot run one in the background: leave "
            "out the & at the end, or run the command in a terminal."
        )
    child = pexpect.spawn(
        "/bin/sh", ["-c", command], timeout=None, encoding="utf-8", codec_errors="replace"
    )
    child.logfile_read = sys.stdout
    try:
        child.expect(pexpect.EOF)
    except KeyboardInterrupt:
        child.logfile_read = None
        ended = _end(child)
        raise Interrupted(
            f"Interrupted: the command and the processes that it started have {ended}. "
            f"Run this cell again, or go on."
        ) from None
    child.wait()
    code = child.exitstatus if child.exitstatus is not None else -child.signalstatus
    # A shell reports a program that a signal ended as 128 + the signal's number.
    return 128 - code if code > 128 else code


def _end(child: "pexpect.spawn") -> str:
    """Interrupt the command and its processes; kill those that do not end. Returns which."""
    import pexpect
    import psutil

    processes: list[psutil.Process] = []
    # torchrun starts each rank in a session of its own, which Ctrl-C does not reach: list the
    # ranks while torchrun is their parent.
    with suppress(psutil.NoSuchProcess):
        shell = psutil.Process(child.pid)
        processes = [shell, *shell.children(recursive=True)]
    deadline = time.monotonic() + SECONDS_TO_END
    killed = False
    try:
        child.sendintr()
        # Read on: a process that prints to a full terminal would wait for ever.
        with suppress(pexpect.TIMEOUT):
            child.expect(pexpect.EOF, timeout=SECONDS_TO_END)
        while any(map(_runs, processes)) and time.monotonic() < deadline:
            time.sleep(0.02)
    except KeyboardInterrupt:
        pass  # the second one: wait no longer
    finally:
        for process in filter(_runs, processes):
            killed = True
            with suppress(psutil.NoSuchProcess):
                process.kill()
        child.close(force=True)
    return "been killed" if killed else "ended"


def _runs(process: "psutil.Process") -> bool:
    import psutil

    with suppress(psutil.NoSuchProcess):
        # A zombie has ended; its parent has not read its exit code yet.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
