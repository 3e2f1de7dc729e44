"""How do programs that are one run end? Together: the first that fails ends the others, within seconds."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

PAUSE = 0.02  # seconds between two looks at the programs
GRACE = 1.0  # seconds between SIGTERM and SIGKILL after a failure: the others wait for the rank that failed
SAVING = 30.0  # seconds to save a checkpoint in, if this process was sent SIGTERM: what Slurm gives, too


class Ranks:
    """One program for each environment, started at once. What they print goes where this process prints.

    programs   rank → its process
    """

    def __init__(self, command: list[str], environments: Mapping[int, Mapping[str, str]]):
        self.programs: dict[int, subprocess.Popen] = {}
        self.ending = False
        try:
            for rank, environment in environments.items():
                self.programs[rank] = subprocess.Popen(command, env=dict(environment))
        except OSError:
            self.end()
            raise

    def failed(self) -> tuple[int, int] | None:
        """(rank, exit code) of the first that was found to have failed; a signal n counts as 128 + n."""
        for rank, program in self.programs.items():
            if program.poll():
                return (
                    rank,
                    program.returncode if program.returncode > 0 else 128 - program.returncode,
                )
        return None

    def running(self) -> bool:
        return any(program.poll() is None for program in self.programs.values())

    def end(self) -> None:
        """SIGTERM to all that still run, SIGKILL to those that do not heed it."""
        self.ending = True
        for program in self.programs.values():
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
        self.wait(GRACE)
        for program in self.programs.values():
            if program.poll() is None:
                program.kill()
                program.wait()

    def wait(self, seconds: float) -> None:
        """Until all have ended, at most `seconds`."""
        deadline = time.monotonic() + seconds
        for program in self.programs.values():
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline - time.monotonic()))

    def watch(self, on_failure: Callable[[int, int], None]) -> threading.Thread:
        """From a thread: call `on_failure(rank, code)` once one has failed, after the others were ended.

        The thread ends when all programs have ended.
        """

        def look() -> None:
            while self.running() or self.failed():
                if self.ending:  # somebody else has ended them, and knows why
                    return
                if failed := self.failed():
                    self.end()
                    on_failure(*failed)
                    return
                time.sleep(PAUSE)

        watcher = threading.Thread(target=look, daemon=True, name="watch over the ranks")
        watcher.start()
        return watcher

    def run(self) -> int:
        """Until all have ended; the exit code. SIGTERM and Ctrl-C here are theirs, too."""
        asked: list[float] = []  # when

        def forward(number: int, frame: object) -> None:
            asked.append(time.monotonic())
            for program in self.programs.values():
                if program.poll() is None:
                    program.send_signal(number)

        before = {
            number: signal.signal(number, forward)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while self.running():
                if (failed := self.failed()) and not asked:
                    rank, code = failed
                    print(
                        f"error: rank {rank} ended with exit code {code}, and the run ends with it.",
                        file=sys.stderr,
                    )
                    self.end()
                    return code
                if asked and time.monotonic() > asked[0] + SAVING:
                    self.end()
                time.sleep(PAUSE)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        failed = self.failed()
        return failed[1] if failed else 0
