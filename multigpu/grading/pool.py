"""Jobs that run notebooks through nbval in parallel."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multigpu.errors import UserError
from multigpu.exercise import processes
from multigpu.exercise.budget import SUBMISSION_CHECKS
from multigpu.grading import temporary

START_SECONDS = 180  # a job's first notebook waits for imports
SPARE_SECONDS = 60.0  # by which nbval waits longer than the checks' own limits


class Job:
    """A process of job.py. Used by one thread."""

    def __init__(self, seconds_per_check: float):
        # Jupyter and IPython leave files where they are killed.
        self._temporary = ExitStack()
        folder = self._temporary.enter_context(temporary.folder())
        environment = dict(os.environ)
        environment |= {
            "TMPDIR": str(folder),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": os.devnull,
        }
        environment.pop("PYTEST_ADDOPTS", None)
        environment.pop("PYTEST_CURRENT_TEST", None)
        self._seconds = SUBMISSION_CHECKS * seconds_per_check + START_SECONDS + SPARE_SECONDS
        cell_seconds = seconds_per_check + START_SECONDS
        self._process = subprocess.Popen(
            [sys.executable, "-m", "multigpu.grading.job", str(cell_seconds)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",  # what lies in the folder of the grader must not be imported
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the jobs
        )

    def run(self, notebook: Path) -> list[dict[str, Any]] | None:
        """The outcome of each cell; None if the process ended, or did not answer in time."""
        watch = threading.Timer(self._seconds, processes.kill, [self._process.pid])
        watch.daemon = True
        watch.start()
        try:
            self._process.stdin.write(json.dumps(str(notebook)) + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
            return json.loads(reply) if reply else None
        except (OSError, ValueError):
            return None
        finally:
            watch.cancel()

    def close(self, now: bool = False) -> None:
        """End the process and its kernel."""
        if now and self._process.poll() is None:  # a number that was waited for is another's
            processes.kill(self._process.pid)
        with suppress(OSError):  # of what was not yet written
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._temporary.close()


class Pool:
    """Jobs in parallel. A `with` block ends them."""

    def __init__(self, jobs: int, seconds_per_check: float):
        """Start no process yet. Raises UserError without nbval."""
        if not find_spec("nbval"):
            raise UserError("checks need nbval and pytest: pip install 'multigpu[test]'.")
        self.jobs = jobs
        self.seconds_per_check = seconds_per_check
        self._idle: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._all: list[Job] = []
        self._closed = False
        for _ in range(jobs):
            self._idle.put(None)  # a job starts when it is needed

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True  # who waits for a job that ends now must not start another one
        for job in self._all:
            job.close(now=True)

    def run(
        self, tasks: Sequence[tuple[str, Path]]
    ) -> Iterator[tuple[str, list[dict] | None]]:
        """Run notebooks; yield (id, outcome of the cells) as they end, in any order.

        The outcome is None if the job ended or hung; it is replaced. Raises UserError if a job
        cannot be started.
        """
        threads = ThreadPoolExecutor(self.jobs)
        try:
            for future in as_completed([threads.submit(self._run, *task) for task in tasks]):
                yield future.result()
        finally:
            # Who stops to ask for outcomes wants no further tasks to begin.
            threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, id: str, notebook: Path) -> tuple[str, list[dict] | None]:
        job = self._idle.get()
        try:
            job = job or self._new_job()
            cells = job.run(notebook)
            if cells is None:
                job.close(now=True)
                job = None
            return id, cells
        finally:
            self._idle.put(job)

    def _new_job(self) -> Job:
        try:
            job = Job(self.seconds_per_check)
        except OSError as error:
            raise UserError(
                f"a process for the checks cannot be started ({error.strerror}): free memory "
                f"and disk, or give fewer --jobs; the same command goes on where it stopped."
            ) from None
        self._all.append(job)
        if self._closed:
            job.close(now=True)
        return job
