"""Find programs; run commands that can hang, with a time limit; read what they print."""

import contextlib
import os
import shutil
import signal
import subprocess

SECONDS = 4  # the time limit of a small command
# Debian puts daemons in these folders, which an ordinary user's PATH often lacks.
DAEMON_FOLDERS = ":/usr/local/sbin:/usr/sbin:/sbin"


def find_program(program: str) -> str | None:
    """The program's path, also in the folders of daemons; None if it is not installed."""
    path = os.environ.get("PATH", "/usr/bin:/bin")
    return shutil.which(program, path=path + DAEMON_FOLDERS)


def run_bounded(*command: str, seconds: float = SECONDS) -> tuple[int | None, str, str]:
    """Run a command for at most `seconds`; return its exit code, stdout and stderr.

    The exit code is None if the command did not end in time or could not be started.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        # If /dev/null is missing, error.filename names it.
        return None, "", f"{error.filename or command[0]}: {error.strerror}"
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        # OSError: the process has just ended.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    # A process that hangs in a driver survives SIGKILL: wait for it at most one second.
    try:
        out = process.communicate(timeout=1)[0]
    except subprocess.TimeoutExpired:
        out = ""
    return None, out, f"no answer in {seconds:g} s"


def first_line(text: str) -> str:
    """The first line that is not blank; "" if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    """The last line that is not blank; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
