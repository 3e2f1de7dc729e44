"""What is this machine? One function a thing to look at; multigpu.doctor says which of them matter and why.

A probe gives a Found. It may raise: the doctor makes that a result. What it starts is bounded in time.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

OK, WARN, MISSING = "ok", "warn", "missing"
GIB = 2**30
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
SECONDS = 4  # for a small command


@dataclass
class Found:
    """What a probe found: ok, warn or missing; one line of text; what to do ('' if nothing); numbers and versions."""

    status: str
    text: str
    fix: str = ""
    details: dict[str, object] = field(default_factory=dict)


def ask(*command: str, seconds: float = SECONDS) -> tuple[int | None, str, str]:
    """Run a command; give its exit code, stdout and stderr. The code is None if it did not end, or could not start."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return (
            None,
            "",
            f"{error.filename or command[0]}: {error.strerror}",
        )  # without /dev/null, it is that
    try:
        out, err = process.communicate(timeout=seconds)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):  # it may have ended just now
            os.killpg(process.pid, signal.SIGKILL)
    try:  # a process that hangs in a driver survives even SIGKILL: then go on without it
        out = process.communicate(timeout=1)[0]
    except subprocess.TimeoutExpired:
        out = ""
    return None, out, f"no answer in {seconds:g} s"


def find(program: str) -> str | None:
    """Give a program's path; the daemons lie in folders that an ordinary user's PATH may lack."""
    return shutil.which(program) or shutil.which(program, path=SBIN)


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def cgroup(name: str) -> str:
    """Read a limit of the container or job that this process is in; '' where there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


# ---- the machine -------------------------------------------------------------------------------------------------


def python() -> Found:
    # No comparison: this package cannot be installed under an older Python than it wants.
    version = ".".join(map(str, sys.version_info[:3]))
    return Found(OK, version, details={"version": version})


def cpu() -> Found:
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    quota, _, period = cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = max(1, min(cores, int(quota) // int(period)))
    if cores == 1:
        return Found(
            WARN, "1 core", "two ranks work, but take turns: expect no speed-up", {"cores": 1}
        )
    return Found(OK, f"{cores} cores", details={"cores": cores})


def memory() -> Found:
    try:
        pairs = re.findall(
            r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
        sizes = {key: int(value) * 1024 for key, value in pairs}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError):  # not Linux
        total, free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (limit := cgroup(name)).isdigit():
            total = min(total, int(limit))
    free = None if free is None else min(free, total)
    details = {
        "total_gib": round(total / GIB, 1),
        "available_gib": None if free is None else round(free / GIB, 1),
    }
    text = f"{total / GIB:.1f} GiB" + (
        "" if free is None else f", {free / GIB:.1f} GiB of it available"
    )
    if (total if free is None else free) < 2 * GIB:
        return Found(WARN, text, "close other programs, or use two ranks at most", details)
    return Found(OK, text, details=details)


def shm() -> Found:
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return Found(MISSING, f"there is no {folder}", "keep DataLoader at num_workers=0")
    usage = shutil.disk_usage(folder)
    details = {
        "total_gib": round(usage.total / GIB, 2),
        "free_gib": round(usage.free / GIB, 2),
    }
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free"
    if not os.access(folder, os.W_OK):
        return Found(WARN, f"{text}, but not writable", f"sudo chmod 1777 {folder}", details)
    if usage.free < GIB:
        return Found(
            WARN,
            text,
            f"sudo mount -o remount,size=4G {folder}; in docker: run --shm-size=4g",
            details,
        )
    return Found(OK, text, details=details)


def files() -> Found:
    import resource  # POSIX only

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    text = f"{soft or 'unlimited'}, can be raised to {hard or 'any number'}"
    details = {"soft": soft, "hard": hard}
    if soft is not None and soft < 1024:
        return Found(
            WARN,
            text,
            "ulimit -n 4096" if not hard or hard >= 4096 else "ask for a higher limit",
            details,
        )
    return Found(OK, text, details=details)


def port() -> Found:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(SECONDS)
        client.connect(server.getsockname())
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            usual.bind(("127.0.0.1", 29500))
            free = True
        except OSError:
            free = False
    text = "the loopback works; 29500, torchrun's usual port, is " + (
        "free" if free else "taken: give another one"
    )
    return Found(OK, text, details={"loopback": True, "port_29500_free": free})
