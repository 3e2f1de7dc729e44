"""NCCL's watchdog for virtual GPUs: a kernel that never ends ends the process, with a report.

Each process has one thread that looks at the unfinished kernels of its groups. If one is older
than its group's timeout, or if nothing has moved for `limit` seconds, the ranks tell each
other what they wait in. Each rank that waits prints it, with the
line of its program, the ranks that have not come and the likely mistake, and ends by SIGABRT,
as with NCCL.
"""

import atexit
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import torch.distributed as dist

from multigpu.virtual.patches import communicator, standstill
from multigpu.virtual.patches.flight_recorder import recorder
from multigpu.virtual.sim import contents

if TYPE_CHECKING:
    from multigpu.virtual.patches.nccl_group import NcclGroup

# The folders of boards, and the file in each that its ranks have locked.
PREFIX = "multigpu-ranks-"
IN_USE = "in-use"
# Seconds between two looks, and how long a rank waits for the others' answers.
INTERVAL = 0.5
ANSWERS = 10.0
# torch's timeout of NCCL's groups, in seconds.
DEFAULT_TIMEOUT = 600.0
# A process that uses this share of a core computes: nothing stands still.
BUSY = 0.2
# The number of looks over which that share is measured.
LOOKS = 20


def program_line(frame: FrameType | None) -> str:
    """The innermost line of the program, "train.py:12"; "" if there is none."""
    line = contents.program_line(frame, skip=(contents.LIBRARIES["purelib"],))
    return f"{line[0]}:{line[1]}" if line else ""


def _locked(path: Path) -> TextIO:
    """The file, open, with a lock that ends with this process, however it ends."""
    file = path.open("a")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def remove_left_folders(parent: Path | None = None) -> None:
    """Remove the boards of earlier runs whose last rank was killed."""
    for path in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*/{IN_USE}"):
        # OSError: a rank still has the lock, the folder is another user's, or it is gone.
        with suppress(OSError), path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


class Board:
    """What the ranks of a group tell each other by files, whatever their hosts do.

    The group's store cannot serve: it is gone as soon as the process that holds it has ended.
    Ranks on other machines do not see the files, and count as without an answer.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, parent: Path | None = None):
        self._in_use: TextIO | None = None
        if rank == 0:
            remove_left_folders(parent)
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._in_use = _locked(made / "part")
            # From here on the folder is removed when nobody has the lock.
            (made / "part").rename(made / IN_USE)
            store.set("board", str(made))
        self.folder = Path(store.get("board").decode())
        if rank > 0:
            # OSError: the folder is on another machine.
            with suppress(OSError):
                self._in_use = _locked(self.folder / IN_USE)
        self.rank = rank
        self.size = size
        # The number of the last question that this rank has answered.
        self.answered = 0

    def set(self, key: str, value: str) -> None:
        # OSError: another machine, or the run's folder is being removed.
        with suppress(OSError):
            part = self.folder / f"{key}.{self.rank}.part"
            part.write_text(value)
            part.replace(self.folder / key)

    def get(self, key: str) -> str:
        """The value of a key; "" if nobody has set it."""
        try:
            return (self.folder / key).read_text()
        except OSError:
            return ""

    def any_waits(self, ranks: Iterable[int]) -> bool:
        """Whether the host of one of these ranks waits where a GPU's host would not."""
        return any(self.get(f"waits-{rank}") == "1" for rank in ranks)

    def asked(self) -> int:
        """The number of the last question."""
        return int(self.get("asked") or 0)

    def ask(self) -> int:
        """Ask all ranks for their state; return the number of the question."""
        number = self.asked() + 1
        self.set("asked", str(number))
        return number

    def answer(self, number: int, state: dict) -> None:
        """Publish this rank's state as the answer to a question."""
        self.answered = number
        self.set(f"state-{self.rank}", json.dumps(state | {"question": number}))

    def states(self, number: int) -> dict[int, dict]:
        """The answers to a question, or to a later one, that have arrived."""
        states = {}
        for rank in range(self.size):
            if text := self.get(f"state-{rank}"):
                state = json.loads(text)
                if state["ended"] or state["question"] >= number:
                    states[rank] = state
        return states

    def leave(self) -> None:
        """Note that this rank reads and writes no more; the last one removes the files."""
        self.set(f"left-{self.rank}", "1")
        if all(self.get(f"left-{rank}") for rank in range(self.size)):
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._in_use is not None:
            self._in_use.close()
            self._in_use = None


class Watchdog:
    """The thread that looks after the groups of this process.

    limit   seconds without a move after which a run stands still
    folder  where the groups' boards are; None: the system's folder for temporary files
    """

    def __init__(self):
        self.limit = 60.0
        self.folder: Path | None = None
        self.groups: weakref.WeakSet[NcclGroup] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._at_exit: util.Finalize | None = None
        self._process = 0
        self._stop = threading.Event()
        # (time, seconds of CPU) of the last looks.
        self._cpu: deque[tuple[float, float]] = deque(maxlen=LOOKS)
        # The age of a kernel after which the next question is asked.
        self._patience = 0.0
        communicator.waiting.here_only.changed = self._tell

    def watch(self, group: "NcclGroup") -> None:
        """Look after a group until it is deleted."""
        self.groups.add(group)
        if self._thread is None:
            self._process = os.getpid()
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
            # A fork of multiprocessing ends without atexit.
            self._at_exit = util.Finalize(None, self.stop, exitpriority=-100)

    def stop(self) -> None:
        """End the thread, and tell the other ranks that this process ends."""
        if self._process != os.getpid():
            # A fork has neither the thread nor a connection of its own.
            return
        self._end_thread()
        for group in list(self.groups):
            self.forget(group)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._at_exit.cancel()

    def forget(self, group: "NcclGroup") -> None:
        """Tell the other ranks of a group that this one takes no more part in it."""
        if group in self.groups and self._process == os.getpid():
            self.groups.discard(group)
            group.board.answer(group.board.answered, self._state(group, True))
            group.board.leave()
            if not self.groups:
                self._end_thread()

    def _tell(self, waits: bool) -> None:
        """Tell the other ranks whether this host waits where a GPU's would not."""
        if self._process == os.getpid():
            for group in list(self.groups):
                group.board.set(f"waits-{group.rank()}", "1" if waits else "0")

    def _run(self) -> None:
        """Look at the groups every INTERVAL seconds, until `stop`."""
        while not self._stop.wait(INTERVAL):
            self._cpu.append((time.monotonic(), cpu_seconds()))
            groups = list(self.groups)
            world = dist.distributed_c10d._world.default_pg
            if world in groups:
                # A rank of another group can be why a group stands still, or does not.
                self._look(world, groups)
                continue
            for group in groups:
                self._look(group, [group])

    def _look(self, answering: "NcclGroup", groups: list["NcclGroup"]) -> None:
        """Look at the kernels of `groups`; the ranks of `answering` tell each other.

        `answering` is one of the groups: its board has the questions and the answers.
        """
        board = answering.board
        number = self._answer(answering)
        waiting = [(kernel, group) for group in groups for kernel in group.unfinished()]
        if board.get("end"):
            self._dump(answering)
            if waiting:
                self._end(waiting, self._answers(answering, number))
            return
        if not waiting:
            self._patience = self.limit
            return
        now = time.monotonic()
        age = now - min(kernel.launched for kernel, _ in waiting)
        # A program's own, shorter timeout counts as with NCCL. The default one does not while
        # a rank computes: a CPU needs minutes for what a GPU does in a second.
        over = any(
            DEFAULT_TIMEOUT > group.timeout.total_seconds() < now - kernel.launched
            for kernel, group in waiting
        )
        if not over and age < max(self._patience, self.limit):
            return
        number = board.ask()
        board.answer(number, self._state(answering, False))
        states = self._answers(answering, number)
        if not over and any(
            state["busy"] and not state["waits"] and not state["ended"]
            for state in states.values()
        ):
            self._patience = age + min(self.limit, 10.0)
            return
        waiting = [(kernel, group) for kernel, group in waiting if not kernel.is_completed()]
        if waiting:
            board.set("end", "1")
            self._dump(answering)
            # The other ranks print and dump before a launcher ends them because this one has
            # ended. Some still ask, too.
            running = [
                rank for rank in range(answering.size()) if self._runs(answering, rank, states)
            ]
            begin = time.monotonic()
            while (waited := time.monotonic() - begin) < ANSWERS:
                if waited > 2 * INTERVAL and all(board.get(f"dumped-{r}") for r in running):
                    break
                self._answer(answering)
                time.sleep(0.05)
            self._end(waiting, states)

    def _dump(self, group: "NcclGroup") -> None:
        """Write the flight recorder's dump, once, and tell the other ranks."""
        key = f"dumped-{group.rank()}"
        if not group.board.get(key):
            _print(recorder().write(group.global_rank(group.rank())))
            group.board.set(key, "1")

    def _runs(self, group: "NcclGroup", rank: int, states: dict[int, dict]) -> bool:
        """Whether a rank of the group has answered, and has not left."""
        state = states.get(group.global_rank(rank))
        return state is not None and not state["ended"]

    def _answer(self, group: "NcclGroup") -> int:
        """Answer the last question, unless it is answered; return its number."""
        number = group.board.asked()
        if number > group.board.answered:
            group.board.answer(number, self._state(group, False))
        return number

    def _answers(self, group: "NcclGroup", number: int) -> dict[int, dict]:
        """The states of the group's ranks, by their numbers in the world."""
        until = time.monotonic() + ANSWERS
        while len(states := group.board.states(number)) < group.size():
            if time.monotonic() > until:
                break
            # Another rank can ask at the same time.
            self._answer(group)
            time.sleep(0.05)
        return {group.global_rank(rank): state for rank, state in states.items()}

    def _state(self, group: "NcclGroup", ended: bool) -> dict:
        """What this rank tells the others of a group: the keys of Report.states."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        return {
            "rank": group.global_rank(group.rank()),
            "ended": ended,
            "waits": communicator.waiting.any(),
            "busy": self._is_busy(),
            "line": program_line(frame),
            "calls": [call for member in list(self.groups) for call in member.described()],
        }

    def _is_busy(self) -> bool:
        """Whether this process, or one of its children, has computed in the last looks."""
        if len(self._cpu) < 2:
            return False
        (first, before), (last, now) = self._cpu[0], self._cpu[-1]
        return now - before > BUSY * (last - first)

    def _end(
        self,
        waiting: list[tuple[communicator.Kernel, "NcclGroup"]],
        states: dict[int, dict],
    ) -> None:
        """Print what NCCL's watchdog prints, and the ranks' states, and end the process.

        It waits in these kernels.
        """
        kernel, group = min(waiting, key=lambda pair: pair[0].launched)
        rank = group.global_rank(group.rank())
        text = kernel.timeout_text()
        members = [group.global_rank(number) for number in range(group.size())]
        report = standstill.Report(group.title(), members, states, rank)
        ending = "To avoid data inconsistency, we are taking the entire process down."
        prefix = _prefix(rank)
        _print(f"{prefix} {text}\n{report.text()}\n{prefix} {ending}\n")
        for call in standstill.on_end:
            call(report.as_json() | {"watchdog": text})
        for group in list(self.groups):
            group.board.leave()
        os.kill(os.getpid(), signal.SIGABRT)


def cpu_seconds() -> float:
    """The seconds in which this process and its children have computed.

    On Linux they include those in which it was ready and waited for a core: on a busy machine
    most of its time. This thread, which wakes up in each look, does not count there.
    """
    total = time.process_time()
    with suppress(OSError, ValueError, IndexError):
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) != threading.get_native_id():
                total += _ready_seconds(task)
            for child in (task / "children").read_text().split():
                process = Path("/proc", child)
                # Fields 14 and 15 of proc(5), after the name in brackets, in clock ticks.
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                total += _ready_seconds(process)
    return total


def _ready_seconds(task: Path) -> float:
    """How long a task was ready and had no core, if its kernel counts that."""
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _prefix(rank: int) -> str:
    now = datetime.now()
    return f"[rank{rank}]:[E{now:%m%d %H:%M:%S.%f}000 ProcessGroupNCCL.cpp:697]"


def _print(text: str) -> None:
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.flush()
    os.write(2, text.encode())


watchdog = Watchdog()
atexit.register(watchdog.stop)
