"""The memory of a GPU that several processes of a run use: they share it, as on a machine.

Each GPU has a file in the folder of the run's records: a table with a row for each process,
which says how much memory the process occupies. A process holds a lock on its row, and the
system releases the lock when the process ends, in whatever way. Its memory is then free.

A process occupies what its caching allocator has reserved.
"""

import fcntl
import mmap
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

from multigpu.errors import UserError
from multigpu.virtual.record import VARIABLE

if TYPE_CHECKING:
    from multigpu.virtual.sim.memory import Meter

SUFFIX = ".memory"
# A table's numbers, of 8 bytes: the most bytes that all processes occupied at the same time,
# the most processes that had a row, the number of rows; then two for each row: pid, bytes.
PEAK, MOST, ROWS, FIRST = range(4)
MOST_ROWS = 1024
TABLE_BYTES = 8 * (FIRST + 2 * MOST_ROWS)


class SharedMemory:
    """The memory of one GPU, of `capacity` bytes, for this process. `path` is its table."""

    def __init__(self, path: Path, capacity: int):
        self.path = path
        self.capacity = capacity
        # Closing a file releases all locks that the process has on it: it is opened once.
        self._file: int | None = None
        self._table = memoryview(b"")
        self._start_in_process()

    def _start_in_process(self) -> None:
        # Locks belong to a process: a fork has none of its parent's.
        self._process = os.getpid()
        self._row: int | None = None
        # The lock of the file does not keep this process's other threads out.
        self._threads = RLock()

    def occupy(self, nbytes: int) -> bool:
        """Let this process occupy `nbytes` bytes of the GPU from now on, more or fewer.

        Returns False, and changes nothing, if the other processes leave too little.
        """
        with self._locked() as has_table:
            if not has_table:
                return True
            others = self._bytes_of_others()
            if others + nbytes > min(self.capacity, self._table[PEAK]):
                self._forget_ended()
                others = self._bytes_of_others()
            if others + nbytes > self.capacity:
                return False
            if self._row is None:
                self._row = self._take_row()
            self._table[self._row + 1] = nbytes
            self._table[PEAK] = max(self._table[PEAK], others + nbytes)
            return True

    def others(self) -> list[tuple[int, int]]:
        """The number of each other process that occupies memory of the GPU, and its bytes."""
        with self._locked() as has_table:
            if not has_table:
                return []
            self._forget_ended()
            return [
                (self._table[row], self._table[row + 1])
                for row in self._rows()
                if row != self._row and self._table[row]
            ]

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep the table from changing; yields False if the run's folder is gone."""
        if self._process != os.getpid():
            self._start_in_process()
        with self._threads:
            # OSError: the command has ended before this process, and removed the folder.
            with suppress(OSError):
                self._open()
            if self._file is None:
                yield False
                return
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
            try:
                yield True
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _open(self) -> None:
        if self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(file, TABLE_BYTES)
            self._table = memoryview(mmap.mmap(file, TABLE_BYTES)).cast("q")
            self._file = file

    def _rows(self) -> range:
        """The places of the rows that are in use or were."""
        return range(FIRST, FIRST + 2 * self._table[ROWS], 2)

    def _bytes_of_others(self) -> int:
        """The bytes of the other rows."""
        end = FIRST + 2 * self._table[ROWS]
        own = 0 if self._row is None else self._table[self._row + 1]
        return sum(self._table[FIRST + 1 : end : 2]) - own

    def _forget_ended(self) -> None:
        """Empty the rows of processes that have ended."""
        for row in self._rows():
            if row != self._row and self._table[row] and _lock_row(self._file, row):
                self._table[row] = self._table[row + 1] = 0
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, row)

    def _take_row(self) -> int:
        """Hold a row for this process; return its place."""
        self._forget_ended()
        free = (row for row in self._rows() if not self._table[row])
        row = next(free, FIRST + 2 * self._table[ROWS])
        if row == FIRST + 2 * MOST_ROWS:
            raise UserError(
                f"{MOST_ROWS:,} processes use one virtual GPU, the most that can: start fewer."
            )
        _lock_row(self._file, row)
        self._table[row], self._table[row + 1] = os.getpid(), 0
        self._table[ROWS] = max(self._table[ROWS], (row - FIRST) // 2 + 1)
        used = sum(self._table[place] > 0 for place in self._rows())
        self._table[MOST] = max(self._table[MOST], used)
        return row


def table_path(folder: Path, number: int) -> Path:
    """The table of this machine's GPU with this number."""
    return folder / f"{machine()}.{number}{SUFFIX}"


def _lock_row(file: int, row: int) -> bool:
    """Lock a row; False if another process, which has not ended, holds it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
    except OSError:
        return False
    return True


class Shared(NamedTuple):
    """What the processes of a run had of a GPU: the most bytes, and the most processes, at
    the same time.
    """

    peak: int
    most_processes: int


def machine(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this process's machine, as the launcher gives it: "node-0", "n1-0".

    torchrun numbers its machines. Slurm names its nodes; each of its jobs can run torchrun.
    """
    name = environ.get("SLURMD_NODENAME", "node")
    return f"{name}-{environ.get('GROUP_RANK', '0')}"


def share(meters: list["Meter"], visible: list[int]) -> None:
    """Let this process share its GPUs with the others of its run, if it is part of one.

    `visible` are the numbers of the GPUs on this machine, in the order of `meters`.
    """
    folder = os.environ.get(VARIABLE)
    for meter, number in zip(meters, visible, strict=True):
        meter.number = number
        if not folder:
            continue
        meter.shared = SharedMemory(table_path(Path(folder), number), meter.capacity)


def read_shared(folder: Path) -> dict[tuple[str, int], Shared]:
    """What the processes of a run had of each GPU, by its machine's name and its number."""
    shared = {}
    for path in folder.glob(f"*{SUFFIX}"):
        table = array("q", path.read_bytes()[: 8 * FIRST])
        name, _, number = path.name.removesuffix(SUFFIX).rpartition(".")
        shared[name, int(number)] = Shared(table[PEAK], table[MOST])
    return shared
