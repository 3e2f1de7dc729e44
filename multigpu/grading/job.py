"""A process that runs notebooks through nbval, one after the other, until its input ends.

Each line is JSON. Of its input it is the path of a notebook; of its output a list with a dict
for each cell: part (the cell's metadata), status, lines (what it printed). nbval decides on
the status: it runs each cell and compares the output with the stored one.

All notebooks run in one kernel, which only ever runs the instructor's cells. It is started
again if it has ended.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel
from nbval.plugin import IPyNbFile, NbCellError

from multigpu.exercise import processes
from multigpu.notebooks.cells import ESCAPE

DIFFERENT = "Cell outputs differ"  # nbval's message


class GradedFile(IPyNbFile):
    """A notebook that runs in the job's kernel."""

    running: RunningKernel | None = None

    def setup(self) -> None:
        """Use the kernel of the notebook before this one, if it is alive."""
        running = GradedFile.running
        if running is None or not running.is_alive():
            GradedFile.running = RunningKernel(CURRENT_ENV_KERNEL_NAME, cwd="/")
        self.kernel = GradedFile.running

    def teardown(self) -> None:
        pass  # the kernel stays


class Job:
    """The plugin of pytest: it takes notebooks from the input in place of collected files."""

    def __init__(self, requests: TextIO, replies: TextIO):
        self.requests = requests
        self.replies = replies
        self.cells: list[dict[str, Any]] = []

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing; an object means that it is done."""
        session.items = []
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the notebooks; an object means that there is nothing else to run."""
        for line in self.requests:
            self.cells = []
            file = GradedFile.from_parent(session, path=Path(json.loads(line)))
            items = list(file.collect())
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            self.replies.write(json.dumps(self.cells) + "\n")
            self.replies.flush()
        if GradedFile.running is not None and GradedFile.running.is_alive():
            GradedFile.running.stop()
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Iterator[Any]:
        """Note the outcome of a cell."""
        report = yield
        failed = call.excinfo is not None
        if call.when == "call" or (call.when == "setup" and failed):
            self.cells.append(
                {
                    "part": item.cell.metadata.get("part"),
                    "status": _status(call),
                    "lines": _printed(item) + (_problem(call) if failed else []),
                }
            )
        return report


def _status(call: pytest.CallInfo) -> str:
    if call.excinfo is None:
        return "right"
    error = call.excinfo.value
    return "wrong" if isinstance(error, NbCellError) and str(error) == DIFFERENT else "blocked"


def _problem(call: pytest.CallInfo) -> list[str]:
    """The error of a cell, one line; nothing for one whose output differs."""
    error = call.excinfo.value
    if str(error) == DIFFERENT:
        return []
    trace = ESCAPE.sub("", getattr(error, "inner_traceback", None) or "").strip().splitlines()
    return [f"{error}: {trace[-1]}" if trace else f"{type(error).__name__}: {error}"]


def _printed(item: pytest.Item) -> list[str]:
    texts = [
        output.text for output in item.test_outputs or () if output.output_type == "stream"
    ]
    return "".join(texts).splitlines()


def _end_with(parent: int) -> None:
    """End this process and its kernel when the grader has ended, by SIGKILL for example."""
    while os.getppid() == parent:
        time.sleep(1.0)
    processes.kill(os.getpid())


def main(seconds: float) -> None:
    """Run the job. nbval waits for a cell for so many seconds."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # pytest replaces its input and output, and the kernel may print.
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = [
        *("-c", os.devnull, "--rootdir", "/", "-p", "nbval.plugin", "-p", "no:cacheprovider"),
        *("--nbval", "--nbval-cell-timeout", str(seconds), "--color=no", "-s", "--noconftest"),
    ]
    pytest.main(options, plugins=[Job(requests, replies)])


if __name__ == "__main__":
    main(float(sys.argv[1]))
