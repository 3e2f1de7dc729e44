"""The sandbox in which students' code runs, and a check that it works on this machine."""

import shutil
from dataclasses import dataclass

from multigpu.commands import first_line, run_bounded

# No network, no other process, no privileges; a file system that is read-only except /tmp.
ISOLATION = (
    "--unshare-all",
    "--die-with-parent",
    "--new-session",
    *("--cap-drop", "ALL"),
    *("--ro-bind", "/", "/"),
    *("--dev", "/dev"),
    *("--proc", "/proc"),
    *("--tmpfs", "/tmp"),
)


@dataclass(frozen=True)
class Sandbox:
    """bubblewrap on this machine.

    program   its path; None if it is not installed
    problem   why it does not work, one line; "" if it works
    """

    program: str | None
    problem: str = ""

    @property
    def works(self) -> bool:
        return self.program is not None and not self.problem


def probe() -> Sandbox:
    """Find bubblewrap and run `true` in a sandbox, which takes at most a few seconds."""
    program = shutil.which("bwrap")
    if program is None:
        return Sandbox(None, "bubblewrap is not installed")
    code, _, err = run_bounded(program, *ISOLATION, "true")
    if code == 0:
        return Sandbox(program)
    return Sandbox(program, first_line(err) or f"exit code {code}")
