"""Processes with all that they have started: their memory, and their end."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def exceeds(pids: Iterable[int], limit: int) -> bool:
    """Whether the processes and their descendants use more than `limit` bytes together.

    What counts is anonymous and shared memory in RAM, swap, and page tables: a byte that is
    read in each 2 MB of an empty mapping costs a page table and no page. Pages that a fork
    shares with its parent count once, where the system tells. A process that has ended uses
    nothing, nor does any where there is no /proc.
    """
    folders = [folder for pid in pids for folder in family(pid)]
    if sum(map(_resident, folders)) <= limit:
        return False
    return sum(map(_proportional, folders)) > limit


def family(pid: int) -> Iterator[Path]:
    """The folders in /proc of the process and of its descendants, as far as it tells them."""
    waiting = [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        yield folder
        try:
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue  # it has ended


def kill(pid: int) -> None:
    """Kill the process and its descendants. If the caller is one of them, it is killed last.

    Each process is stopped before its children are listed, so that it starts no others.
    """
    caller = os.getpid()
    numbers = []
    for folder in family(pid):
        numbers.append(int(folder.name))
        if numbers[-1] != caller:
            _stop(numbers[-1])
    for number in sorted(numbers, key=caller.__eq__):
        _signal(number, signal.SIGKILL)


def _stop(pid: int) -> None:
    """Stop the process; wait at most 0.2 s, because the list of its children is right then."""
    _signal(pid, signal.SIGSTOP)
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "TtZX":
            return
        time.sleep(0.002)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _resident(folder: Path) -> int:
    return _sum(folder / "status", ("RssAnon", "RssShmem", "VmSwap", "VmPTE"))


def _proportional(folder: Path) -> int:
    """As _resident, but a page of n processes counts 1/n in each; slow to read."""
    rollup = folder / "smaps_rollup"
    total = _sum(rollup, ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return total + _sum(folder / "status", ("VmPTE",)) if total else _resident(folder)


def _sum(file: Path, names: tuple[str, ...]) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    total = 0
    for line in lines:
        name, _, value = line.partition(":")
        if name in names:
            total += int(value.split()[0]) * 1024
    return total
