"""Probes of this machine: one function each for Python, CPU, memory, limits and ports.

A probe returns a Finding. If it raises an exception, the doctor reports that as the result.
Everything that a probe starts has a time limit.
"""

import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from multigpu.launch.commands import SECONDS

OK, WARN, MISSING = "ok", "warn", "missing"
GIB = 2**30
TORCHRUN_PORT = 29500


@dataclass
class Finding:
    """What a probe found.

    status    OK, WARN or MISSING
    text      the finding, one line
    fix       what to do; "" if nothing
    details   numbers and versions, for `--json`
    """

    status: str
    text: str
    fix: str = ""
    details: dict[str, object] = field(default_factory=dict)


def cgroup(name: str) -> str:
    """A limit of the container or job that this process is in; "" if there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


def python() -> Finding:
    # No comparison is needed: pip does not install this package for an older Python.
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(OK, version, details={"version": version})


def cpu() -> Finding:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota, _, period = cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = max(1, min(cores, int(quota) // int(period)))
    if cores == 1:
        fix = "two ranks work, but take turns: expect no speed-up"
        return Finding(WARN, "1 core", fix, {"cores": 1})
    return Finding(OK, f"{cores} cores", details={"cores": cores})


def memory() -> Finding:
    total, available = _memory_of_machine()
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = cgroup(name)
        if limit.isdigit():
            total = min(total, int(limit))
    details: dict[str, object] = {"total_gib": round(total / GIB, 1), "available_gib": None}
    text = f"{total / GIB:.1f} GiB"
    if available is not None:
        available = min(available, total)
        details["available_gib"] = round(available / GIB, 1)
        text += f", {available / GIB:.1f} GiB of it available"
    usable = total if available is None else available
    if usable < 2 * GIB:
        return Finding(WARN, text, "close other programs, or use two ranks at most", details)
    return Finding(OK, text, details=details)


def _memory_of_machine() -> tuple[int, int | None]:
    """Total and available bytes; on systems other than Linux the latter is None."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        pairs = re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)
        sizes = {key: int(value) * 1024 for key, value in pairs}
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None


def shm() -> Finding:
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return Finding(MISSING, f"there is no {folder}", "keep DataLoader at num_workers=0")
    usage = shutil.disk_usage(folder)
    details = {
        "total_gib": round(usage.total / GIB, 2),
        "free_gib": round(usage.free / GIB, 2),
    }
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if not os.access(folder, os.W_OK):
        return Finding(WARN, f"{text}, but not writable", f"sudo chmod 1777 {folder}", details)
    if usage.free < GIB:
        fix = f"sudo mount -o remount,size=4G {folder}; in docker: run --shm-size=4g"
        return Finding(WARN, text, fix, details)
    return Finding(OK, text, details=details)


def files() -> Finding:
    # The module exists on POSIX only.
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    text = f"{soft or 'unlimited'}, can be raised to {hard or 'any number'}"
    details = {"soft": soft, "hard": hard}
    if soft is not None and soft < 1024:
        can_raise = hard is None or hard >= 4096
        fix = "ulimit -n 4096" if can_raise else "ask for a higher limit"
        return Finding(WARN, text, fix, details)
    return Finding(OK, text, details=details)


def port() -> Finding:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(SECONDS)
        client.connect(server.getsockname())
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", TORCHRUN_PORT))
            free = True
        except OSError:
            free = False
    state = "free" if free else "in use: give another one"
    text = f"the loopback works; {TORCHRUN_PORT}, torchrun's usual port, is {state}"
    return Finding(OK, text, details={"loopback": True, "port_29500_free": free})
