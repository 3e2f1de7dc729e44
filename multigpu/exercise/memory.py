"""The memory of a process and of all that it has started."""

from collections.abc import Iterator
from pathlib import Path


def exceeds(pid: int, limit: int) -> bool:
    """Whether the process and its descendants use more than `limit` bytes.

    What counts is anonymous and shared memory in RAM, and swap. Pages that a fork shares with
    its parent count once, where the system tells. False for a process that has ended, and
    where there is no /proc.
    """
    folders = list(_family(pid))
    if sum(map(_resident, folders)) <= limit:
        return False
    return sum(map(_proportional, folders)) > limit


def _family(pid: int) -> Iterator[Path]:
    waiting = [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        yield folder
        try:
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue  # it has ended


def _resident(folder: Path) -> int:
    return _sum(folder / "status", ("RssAnon", "RssShmem", "VmSwap"))


def _proportional(folder: Path) -> int:
    """As _resident, but a page of n processes counts 1/n in each; slow to read."""
    rollup = folder / "smaps_rollup"
    total = _sum(rollup, ("Pss_Anon", "Pss_Shmem", "SwapPss"))
    return total or _resident(folder)


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
