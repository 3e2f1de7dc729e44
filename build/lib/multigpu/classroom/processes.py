"""The processes of the classroom cluster, found in /proc by the files that they use.

Pid files are not used, because the number in an old pid file can belong to another program. A
daemon belongs to the cluster if it runs as this user, sees the same file system, and has the
cluster's slurm.conf or munge socket on its command line. A job's process belongs to the
cluster if its environment comes from one of the cluster's slurmds.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multigpu.classroom.conf import conf_path, node_names, state_dir


def processes() -> Iterator[tuple[int, list[str]]]:
    """Pid and command line of each process that has the same root directory as this one."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # OSError: the process has ended meanwhile.
        with suppress(OSError):
            command_line = Path("/proc", name, "cmdline").read_bytes()
            if _sees_this_file_system(name):
                yield int(name), command_line.decode(errors="replace").split("\0")


def _sees_this_file_system(pid: str) -> bool:
    """Whether the process has this one's root directory; True if its user hides it."""
    try:
        return os.path.samefile(f"/proc/{pid}/root", "/")
    except PermissionError:
        return True


def daemons() -> dict[str, int]:
    """The pids of the cluster's running daemons, by name: munged, slurmctld, `slurmd n1`, …"""
    pids = {}
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
                pids[name] = pid
    return pids


def job_processes(node: str = "") -> list[int]:
    """The pids that the cluster's slurmds started: each job's processes and its slurmstepd.

    With a node's name, those of this node.
    """
    mark = f"SLURMD_NODENAME={node}".encode()
    jobs = set()
    parents = set()
    steps = set()
    for pid, words in processes():
        # slurmstepd's title overwrites its environment: look at its children's environment.
        if words[0].startswith("slurmstepd"):
            steps.add(pid)
        # OSError: the process is another user's, or it has ended meanwhile.
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            launched = any(
                variable == mark if node else variable.startswith(mark)
                for variable in environment
            )
            if launched and f"SLURM_CONF={conf_path()}".encode() in environment:
                jobs.add(pid)
                stat = Path(f"/proc/{pid}/stat").read_text()
                parents.add(int(stat.rpartition(")")[2].split()[1]))
    return sorted(jobs | (parents & steps))


def foreign_daemon() -> tuple[int, str] | None:
    """Pid and program of a Slurm daemon that belongs to no classroom cluster, or None."""
    for pid, words in processes():
        of_a_classroom = any(word.endswith("/multigpu/slurm/slurm.conf") for word in words)
        if os.path.basename(words[0]) in ("slurmctld", "slurmd") and not of_a_classroom:
            return pid, words[0]
    return None
