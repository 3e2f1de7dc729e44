"""NCCL's watchdog for virtual GPUs: a kernel that never ends ends the process, with a report.

Each process has one thread that looks at the unfinished kernels of its groups. If one is older
than its group's timeout, or if nothing has moved for `limit` seconds, the ranks tell each
other through the group's store what they wait in. Each rank that waits prints it, with the
line of its program, the ranks that have not come and the likely mistake, and ends by SIGABRT,
as with NCCL.
"""

import atexit
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from multigpu.vgpu.patches import communicator, standstill

if TYPE_CHECKING:
    from multigpu.vgpu.patches.nccl_group import NcclGroup

# Seconds between two looks, and how long a rank waits for the others' answers.
INTERVAL = 0.5
ANSWERS = 3.0
# A process that uses this share of a core computes: nothing stands still.
BUSY = 0.2
# Files of the program are not below these folders.
LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)


def program_line(frame: Any) -> str:
    """The innermost line of the program, "train.py:12"; "" if there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(LIBRARIES):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Board:
    """What the ranks of a group tell each other through its store, whatever their hosts do."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        # A client of its own: the program's can be in the middle of a call that waits.
        self._store = store.clone()
        self.rank = rank
        self.size = size
        self.answered = 0

    def set(self, key: str, value: str) -> None:
        # RuntimeError: the process with the store has ended.
        with suppress(RuntimeError):
            self._store.set(key, value)

    def get(self, key: str) -> str:
        """The value of a key; "" if nobody has set it, or if the store is gone."""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return ""

    def any_waits(self, ranks: Iterable[int]) -> bool:
        """Whether the host of one of these ranks waits for a kernel."""
        return any(self.get(f"waits/{rank}") == "1" for rank in ranks)

    def ask(self) -> int:
        """Ask all ranks for their state; return the number of the question."""
        try:
            number = self._store.add("asked", 1)
        except RuntimeError:
            number = self.answered + 1
        return number

    def states(self, number: int) -> dict[int, dict]:
        """The answers to a question, or to a later one, that have arrived."""
        states = {}
        for rank in range(self.size):
            if text := self.get(f"state/{rank}"):
                state = json.loads(text)
                if state["ended"] or state["question"] >= number:
                    states[rank] = state
        return states

    def answer(self, number: int, state: dict) -> None:
        """Publish this rank's state as the answer to a question."""
        self.answered = number
        self.set(f"state/{self.rank}", json.dumps(state | {"question": number}))

    def asked(self) -> int:
        """The number of the last question."""
        return int(self.get("asked") or 0)


class Watchdog:
    """The thread that looks after the groups of this process.

    `limit` is the number of seconds without a move after which a run stands still.
    """

    def __init__(self):
        self.limit = 60.0
        self.groups: weakref.WeakSet[NcclGroup] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._cpu: list[tuple[float, float]] = []
        # The age of the kernels after which the next question is asked.
        self._patience: dict[int, float] = {}
        communicator.waiting.changed = self._tell

    def watch(self, group: "NcclGroup") -> None:
        """Look after a group until it is deleted."""
        self.groups.add(group)
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and tell the other ranks that this process ends."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for group in list(self.groups):
            group.board.answer(group.board.answered, self._state(group, True))

    def _tell(self, waits: bool) -> None:
        for group in list(self.groups):
            group.board.set(f"waits/{group.rank()}", "1" if waits else "0")

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._cpu = [*self._cpu[-20:], (time.monotonic(), time.process_time())]
            for group in list(self.groups):
                self._look(group)

    def _look(self, group: "NcclGroup") -> None:
        board = group.board
        asked = board.asked()
        if asked > board.answered:
            board.answer(asked, self._state(group, False))
        if board.get("end"):
            self._answers(group, asked)
            self._end(group, board.states(asked))
            return
        kernels = group.unfinished()
        if not kernels:
            return
        age = time.monotonic() - min(kernel.launched for kernel in kernels)
        over = age > group.timeout.total_seconds()
        if not over and age < self._patience.get(id(group), self.limit):
            return
        number = board.ask()
        board.answer(number, self._state(group, False))
        states = self._answers(group, number)
        if not over and any(
            state["busy"] and not state["waits"] and not state["ended"]
            for state in states.values()
        ):
            self._patience[id(group)] = age + min(self.limit, 10.0)
            return
        if kernels and group.unfinished():
            board.set("end", "1")
            # The other ranks print before a launcher ends them because this one has ended.
            time.sleep(2 * INTERVAL)
            self._end(group, states)

    def _answers(self, group: "NcclGroup", number: int) -> dict[int, dict]:
        until = time.monotonic() + ANSWERS
        while len(states := group.board.states(number)) < group.size():
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return states

    def _state(self, group: "NcclGroup", ended: bool) -> dict:
        frame = sys._current_frames().get(threading.main_thread().ident)
        return {
            "rank": group.global_rank(group.rank()),
            "ended": ended,
            "waits": communicator.waiting.count > 0,
            "busy": self._is_busy(),
            "line": program_line(frame),
            "number": group.sequence,
            "calls": [call for one in list(self.groups) for call in one.described()],
        }

    def _is_busy(self) -> bool:
        """Whether this process has computed in the last ten seconds."""
        if len(self._cpu) < 2:
            return False
        (first, before), (last, now) = self._cpu[0], self._cpu[-1]
        return now - before > BUSY * (last - first)

    def _end(self, group: "NcclGroup", states: dict[int, dict]) -> None:
        """Print the report, and end the process if it waits in this group."""
        kernels = group.unfinished()
        if not kernels:
            return
        rank = group.global_rank(group.rank())
        first = min(kernels, key=lambda kernel: kernel.launched)
        text = timeout_text(first, group, rank)
        report = standstill.Report.of(group.title(), group.size(), states, rank)
        _print(
            f"{_prefix(rank)} {text}\n{report.text()}\n"
            f"{_prefix(rank)} To avoid data inconsistency, we are taking the entire process "
            f"down.\n"
        )
        for call in standstill.on_end:
            call(report.as_json() | {"watchdog": text})
        os.kill(os.getpid(), signal.SIGABRT)


def timeout_text(kernel: communicator.Kernel, group: "NcclGroup", rank: int) -> str:
    """The words of NCCL's watchdog (torch 2.13, ProcessGroupNCCL.cpp) for a kernel."""
    ran = (time.monotonic() - kernel.launched) * 1000
    return (
        f"[Rank {rank}] Watchdog caught collective operation timeout: "
        f"{kernel.described(group.timeout)} ran for {ran:.0f} milliseconds before timing out."
    )


def _prefix(rank: int) -> str:
    now = datetime.now()
    return f"[rank{rank}]:[E{now:%m%d %H:%M:%S.%f}000 ProcessGroupNCCL.cpp:697]"


def _print(text: str) -> None:
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.flush()
    os.write(2, text.encode())


watchdog = Watchdog()
atexit.register(watchdog.stop)
