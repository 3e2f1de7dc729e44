"""`python train.py` as several ranks: start the script again, once for each further rank.

This process becomes rank 0. The other processes run the same file from its first line, read
their rank from the environment, and connect to rank 0 when they call `fit`.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

import torch.distributed as dist

from multigpu import launch
from multigpu.errors import UserError, connection_lost, error_hook, pluralize
from multigpu.launch.processes import Processes
from multigpu.launch.room import check_room

# Seconds that rank 0 waits for a rank to end after a connection broke. Atexit functions or a
# busy machine can delay the end.
WAIT_AFTER_LOST_CONNECTION = 10.0
# Seconds that rank 0 waits after any other error, because another rank may have caused it.
WAIT_AFTER_ERROR = 1.0
# Seconds that rank 0 waits for the other ranks before it prints that it waits.
SILENT_WAIT = 5.0


def relaunch_script(processes: int) -> None:
    """Make this process rank 0 of `processes` on this machine, and start the others.

    All ranks end together: if one fails, the others are ended within seconds, and this process
    ends with the exit code of the failed rank. Raises UserError if there is no script to start
    again (in a notebook or at Python's prompt), or no memory for the processes.
    """
    command = _command()
    check_room(processes)
    relaunch = Relaunch(command, processes)
    error_hook().started_ranks = relaunch
    atexit.register(relaunch.wait_for_others)


class Relaunch:
    """The other ranks of this process's script; this process, rank 0, starts and ends them.

    store      the store where the ranks find each other; it must exist until this process ends
    others     the processes of ranks 1 and up
    watcher    the thread that ends this process when one of the others fails
    finished   set when rank 0 has finished
    """

    def __init__(self, command: list[str], size: int):
        self.finished = threading.Event()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MULTIGPU_LAUNCHER": "ddp",
        }
        environments = {
            rank: {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(1, size)
        }
        self.others = Processes(command, environments)
        os.environ.update(shared, RANK="0", LOCAL_RANK="0")
        self.watcher = self.others.watch(self.leave_after_failure)

    def end(self) -> None:
        """End the other ranks."""
        self.others.end()

    def end_after(self, error: BaseException) -> None:
        """End the other ranks because of rank 0's `error`.

        When a rank fails, rank 0's connection breaks at once, but the failed rank's process
        ends a little later. So wait first: if a rank has failed, its traceback shows the
        cause, and the watcher ends this process.
        """
        if not isinstance(error, KeyboardInterrupt):
            lost = connection_lost(error)
            deadline = time.monotonic() + (
                WAIT_AFTER_LOST_CONNECTION if lost else WAIT_AFTER_ERROR
            )
            while time.monotonic() < deadline:
                if self.others.failed():
                    # The watcher ends this process during the sleep.
                    time.sleep(60)
                time.sleep(0.05)
        self.others.end()

    def leave_after_failure(self, rank: int, code: int) -> None:
        """End this process at once, with the exit code of the rank that failed.

        The watcher's thread calls this. Rank 0 may be waiting for the failed rank in a
        collective, and no exception interrupts a collective.
        """
        # If rank 0 has finished, a rank that ends by SIGTERM is not a failure.
        sigterm_at_end = code == 128 + signal.SIGTERM and self.finished.is_set()
        if not sigterm_at_end:
            # Not sys.stderr, because torch replaces it while another thread prints an
            # exception.
            print(
                f"error: rank {rank} ended with exit code {code}, so the run ends: look for "
                f"the rank's message above.",
                file=sys.__stderr__,
                flush=True,
            )
        sys.stdout.flush()
        os._exit(code)

    def wait_for_others(self) -> None:
        """At the end of this process, wait for the other ranks: they can work after `fit`.

        If one of the others fails, the watcher ends this process with the failed rank's exit
        code. SIGTERM and Ctrl-C end all ranks.
        """
        self.finished.set()
        # After sys.exit within fit the other ranks still wait for this rank, so break their
        # connections.
        launch.end_gloo()
        signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: signals.append(number))
        silent_until = time.monotonic() + SILENT_WAIT
        reported = False
        while self.watcher.is_alive() and not signals:
            self.watcher.join(0.1)
            if not reported and time.monotonic() > silent_until:
                reported = self.report_running()
        self.others.end()
        if signals:
            os._exit(128 + signals[0])

    def report_running(self) -> bool:
        """Print which ranks rank 0 waits for; return False if no other rank runs any more."""
        ranks = self.others.running()
        if not ranks:
            return False
        names = f"rank {ranks[0]}" if len(ranks) == 1 else pluralize(len(ranks), "rank")
        print(
            f"rank 0 is done, and waits for {names}. Ctrl-C ends the run.",
            file=sys.stderr,
            flush=True,
        )
        return True


def _command() -> list[str]:
    """This process's command: python, its options, the file or `-m module`, the arguments."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file in (None, "<stdin>") or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise UserError(
            "strategy='ddp' starts the script again for each rank, but this code is not in a "
            "script: write one, or give strategy='ddp_notebook' in a notebook or at a prompt."
        )
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]
    spec = getattr(main, "__spec__", None)
    if spec is None:
        return [*python, os.path.abspath(file), *sys.argv[1:]]
    return [*python, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
