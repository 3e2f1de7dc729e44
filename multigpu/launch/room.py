"""Whether this machine has room for the processes of a run: memory and cores."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multigpu.errors import UserError, pluralize, warn

MIB = 2**20
GIB = 2**30
# What a rank of lesson 05 uses alone: torch, gloo, data and model, without the shared pages of
# libraries. Larger models use more, so this is the least that a run needs.
TORCH_RANK = 200 * MIB
# The same for a worker of lesson 08, which imports TensorFlow, too.
TENSORFLOW_RANK = 400 * MIB


def check_room(processes: int) -> None:
    """Check, before they start, that this machine has room for `processes` more processes.

    Raises UserError as `check_memory` does, and warns as `warn_about_cores` does.
    """
    check_memory(processes)
    warn_about_cores(processes)


def check_memory(processes: int) -> None:
    """Raise UserError if the free memory cannot hold `processes` more processes.

    The free memory is that of the machine, or of this process's cgroups if it is less.
    """
    per_process = TENSORFLOW_RANK if "tensorflow" in sys.modules else TORCH_RANK
    memory = available_memory()
    if memory is not None and processes * per_process > memory:
        fewer = max(1, memory // per_process)
        raise UserError(
            f"{pluralize(processes, 'process')} of a run need at least "
            f"{processes * per_process / GIB:.1f} GiB of memory, but {memory / GIB:.1f} GiB "
            f"are available: start {fewer} or fewer."
        )


def warn_about_cores(processes: int) -> None:
    """Print a warning to stderr if there are more processes than cores."""
    cores = available_cores()
    if processes > cores:
        warn(
            f"{processes} processes share {pluralize(cores, 'core')} and slow each "
            f"other down: start {cores} for a fast run."
        )


def available_cores() -> int:
    """The number of cores that this process can use; outside Linux, all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that new processes can use, without swapping; None if the system does not say.

    It is the least of the machine's available memory and of what the limits of this process's
    cgroups leave: a container and a Slurm job have such limits. `root` has proc and sys.
    """
    free = [size for size in (_free_in_machine(root), *_free_in_cgroups(root)) if size]
    return min(free, default=None)


def _free_in_machine(root: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"MemAvailable: +(\d+) kB", (root / "proc/meminfo").read_text())
        if match:
            return int(match[1]) * 1024
    return None


def _free_in_cgroups(root: Path) -> Iterator[int]:
    """The free bytes of each cgroup of this process that has a limit, and of its parents.

    A line of /proc/self/cgroup is `0::PATH` (version 2) or `4:memory:PATH` (version 1). In a
    container the PATH can be the host's; then only the top folder exists.
    """
    lines = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            yield from _free_below_limit(place, *names)
            if place == top:
                break


def _free_below_limit(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """The free bytes of one cgroup; nothing if it has no limit.

    The kernel drops `reclaimable`, pages of files that are not in use, when it needs memory.
    """
    with suppress(OSError, ValueError):
        # ValueError: the limit is "max", which means none.
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
        match = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
        yield max(1, most - used + (int(match[1]) if match else 0))
