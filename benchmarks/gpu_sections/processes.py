"""Programs that a check starts: with a time limit, and ended with all that they have started.

It needs Python alone, because benchmarks/gpu_check.py uses it before it knows that torch is
installed.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run_limited(
    command: Sequence[object], seconds: float, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a command for at most `seconds`; return its exit code and its output.

    The code is None if the time was over: the command's process group was then killed.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=max(0.1, seconds))
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def kill_session(session: int) -> None:
    """Kill all processes of a session, whatever their process groups are.

    A check is the leader of a session of its own, so this ends the ranks that its scripts have
    started, too.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            # After the name, which can have spaces: state, parent, group, session.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(int(folder.name))
    for process in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def last_lines(text: str, count: int = 15) -> str:
    """The end of a program's output, for a report."""
    return "\n".join(text.strip().splitlines()[-count:])
