"""Which processes belong to the classroom cluster? Those that /proc shows to be started with its own files.

No pid file is believed, because a pid file can be stale and its number may be somebody else's by now. A daemon is ours
when it is of our user, sees the same files as we do, and has our own slurm.conf or socket on its command line. A job's
process is ours when one of our slurmds has given it its environment.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multigpu.classroom.conf import conf_path, node_names, state_dir


def processes() -> Iterator[tuple[int, list[str]]]:
    """The pid and the command line of every process that sees the same files as we do: none of another container."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = (
                    Path("/proc", name, "cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .split("\0")
                )
                with suppress(
                    PermissionError
                ):  # another user's process does not show its root
                    if not os.path.samefile(f"/proc/{name}/root", "/"):
                        continue
            except OSError:  # it has ended meanwhile
                continue
            yield int(name), words


def daemons() -> dict[str, int]:
    """The pids of our cluster's daemons that run now, by name: munged, slurmctld, `slurmd n1`, …"""
    found = {}
    for pid, words in processes():
        program = os.path.basename(words[0])
        if program == "munged" and f"--socket={state_dir()}/munge.socket" in words:
            name = program
        elif program in ("slurmctld", "slurmd") and str(conf_path()) in words:
            name = " ".join([program, *(word for word in words if word in node_names(99))])
        else:
            continue
        with suppress(FileNotFoundError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                found[name] = pid
    return found


def job_processes() -> list[int]:
    """The pids of what our slurmds have started: whatever runs in a job, and the slurmstepd above it."""
    jobs, parents, steps = set(), set(), set()
    for pid, words in processes():
        if words[0].startswith(
            "slurmstepd"
        ):  # its title covers its environment, but its children show theirs
            steps.add(pid)
        with suppress(OSError):  # not ours to look at, or ended meanwhile
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            launched = any(
                variable.startswith(b"SLURMD_NODENAME=") for variable in environment
            )
            if launched and f"SLURM_CONF={conf_path()}".encode() in environment:
                jobs.add(pid)
                parents.add(
                    int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                )
    return sorted(jobs | (parents & steps))


def foreign() -> tuple[int, str] | None:
    """The pid and program of a Slurm daemon that no classroom cluster has started, or None."""
    for pid, words in processes():
        of_a_classroom = any(word.endswith("/multigpu/slurm/slurm.conf") for word in words)
        if os.path.basename(words[0]) in ("slurmctld", "slurmd") and not of_a_classroom:
            return pid, words[0]
    return None
