"""The processes of a run end together: if one fails, the others are ended within seconds."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

POLL_INTERVAL = 0.02  # seconds
# Seconds between SIGTERM and SIGKILL after a failure. The time is short, because the other
# ranks only wait for the failed rank.
GRACE_AFTER_FAILURE = 1.0
# Seconds in which the ranks can save a checkpoint after this process received SIGTERM. Slurm
# gives the same by default.
GRACE_AFTER_SIGTERM = 30.0


class Processes:
    """Start `command` once per rank, with that rank's environment.

    All processes share this process's output.

    by_rank   rank → its process
    ending    True after `end` was called
    """

    def __init__(self, command: list[str], environments: Mapping[int, Mapping[str, str]]):
        self.by_rank: dict[int, subprocess.Popen] = {}
        self.ending = False
        try:
            for rank, environment in environments.items():
                self.by_rank[rank] = subprocess.Popen(command, env=dict(environment))
        except OSError:
            self.end()
            raise

    def failed(self) -> tuple[int, int] | None:
        """(rank, exit code) of a failed process, or None; signal n is exit code 128 + n."""
        for rank, process in self.by_rank.items():
            code = process.poll()
            if code:
                return rank, code if code > 0 else 128 - code
        return None

    def running(self) -> list[int]:
        """The ranks whose processes still run."""
        return [rank for rank, process in self.by_rank.items() if process.poll() is None]

    def send_signal(self, number: int) -> None:
        """Send a signal to all processes that still run."""
        for rank in self.running():
            self.by_rank[rank].send_signal(number)

    def end(self) -> None:
        """Send SIGTERM to all running ranks, and SIGKILL GRACE_AFTER_FAILURE seconds later."""
        self.ending = True
        self.send_signal(signal.SIGTERM)
        self.wait(GRACE_AFTER_FAILURE)
        for rank in self.running():
            self.by_rank[rank].kill()
            self.by_rank[rank].wait()

    def wait(self, seconds: float) -> None:
        """Wait until all processes have ended, but at most `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.by_rank.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def watch(self, on_failure: Callable[[int, int], None]) -> threading.Thread:
        """Start a thread that ends all processes if one fails; return the thread.

        After a failure the thread calls `on_failure(rank, code)`. It ends when all processes
        have ended.
        """

        def watch_until_end() -> None:
            while self.running() or self.failed():
                # Another thread is ending the processes and reports why.
                if self.ending:
                    return
                if failed := self.failed():
                    self.end()
                    on_failure(*failed)
                    return
                time.sleep(POLL_INTERVAL)

        thread = threading.Thread(target=watch_until_end, daemon=True, name="watch the ranks")
        thread.start()
        return thread

    def run(self) -> int:
        """Wait until all processes have ended; return the exit code of the run.

        SIGTERM and Ctrl-C that reach this process are passed on to all ranks.
        """
        signalled_at: list[float] = []

        def forward(number: int, frame: FrameType | None) -> None:
            signalled_at.append(time.monotonic())
            self.send_signal(number)

        previous = {
            number: signal.signal(number, forward)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while self.running():
                failed = self.failed()
                if failed and not signalled_at:
                    rank, code = failed
                    print(
                        f"error: rank {rank} ended with exit code {code}, so the run ends.",
                        file=sys.stderr,
                    )
                    self.end()
                    return code
                if signalled_at and time.monotonic() > signalled_at[0] + GRACE_AFTER_SIGTERM:
                    self.end()
                time.sleep(POLL_INTERVAL)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        failed = self.failed()
        return failed[1] if failed else 0
