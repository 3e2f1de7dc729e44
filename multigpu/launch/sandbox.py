"""The sandbox in which students' code runs, and a check that it works on this machine."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from multigpu.launch.commands import first_line, run_bounded

REFUSED = 77  # an exit code that neither bubblewrap nor Python has
# A user, mount, process, network and IPC namespace: CLONE_NEW… of sched.h.
NAMESPACES = f"""
import ctypes, sys
sys.exit({REFUSED} if ctypes.CDLL(None).unshare(0x78020000) else 0)
"""


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
    """Find bubblewrap, and make namespaces in a sandbox, as each student's process has them.

    It takes at most a few seconds.
    """
    program = shutil.which("bwrap")
    if program is None:
        return Sandbox(None, "bubblewrap is not installed")
    code, _, err = run_bounded(program, *isolation(), sys.executable, "-IS", "-c", NAMESPACES)
    if code == 0:
        return Sandbox(program)
    if code == REFUSED:
        return Sandbox(program, "a process in it may not make namespaces of its own")
    return Sandbox(program, first_line(err) or f"exit code {code}")


def shown() -> list[Path]:
    """What the sandbox shows of the machine's files: Python, its packages and this library."""
    system = {Path(name) for name in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")}
    library = Path(__file__).parents[1]
    return sorted(system | {Path(sys.prefix), Path(sys.base_prefix), library})


def shows(path: Path) -> bool:
    """Whether a file or folder can be read in the sandbox."""
    path = path.resolve()
    return any(path.is_relative_to(folder.resolve()) for folder in shown())


def isolation() -> list[str]:
    """bubblewrap's arguments: a read-only file system, except /tmp; no network.

    root needs no user namespace. There, the worker becomes an ordinary user, because limits do
    not hold for root.
    """
    words = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if os.getuid() == 0:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    words += ["--dev", "/dev", "--proc", "/proc", "--perms", "1777", "--tmpfs", "/tmp"]
    paths = shown()
    parents = {parent for path in paths for parent in path.parents}
    for folder in sorted(parents - {Path("/")}):
        if not any(folder == path or path in folder.parents for path in paths):
            words += ["--perms", "0755", "--dir", str(folder)]
    for path in paths:
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    # An ordinary user owns both, and what one answer leaves there another would find.
    words += ["--remount-ro", "/", "--remount-ro", "/dev"]
    return [*words, "--chdir", "/tmp"]
