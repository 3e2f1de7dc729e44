"""Profilers measure how long the Trainer's actions take, by name."""

import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from multigpu.errors import UserError

NO_MEASUREMENT = nullcontext()


class PassThroughProfiler:
    """A profiler that measures nothing."""

    def __init__(self, dirpath: str | os.PathLike | None = None, filename: str | None = None):
        self.dirpath = dirpath
        self.filename = filename
        self._stage: str | None = None
        self._local_rank: int | None = None

    def setup(
        self, stage: str, local_rank: int | None = None, log_dir: str | None = None
    ) -> None:
        """Called before a run of `stage` (e.g. "fit"); `log_dir` is the default `dirpath`."""
        self._stage = stage
        self._local_rank = local_rank
        self.dirpath = self.dirpath or log_dir

    def teardown(self, stage: str | None) -> None: ...
    def start(self, action_name: str) -> None: ...
    def stop(self, action_name: str) -> None: ...

    def profile(self, action_name: str) -> AbstractContextManager[str | None]:
        """A context manager that measures its block under `action_name`."""
        return NO_MEASUREMENT

    def summary(self) -> str:
        """The report as text."""
        return ""

    def describe(self) -> None:
        """Print the report on the first rank of each node.

        If `filename` is given, each rank writes its report to a file in `dirpath` instead; the
        file's name contains the stage and the local rank.
        """
        text = self.summary()
        if not text:
            return
        if not (self.filename and self.dirpath):
            if not self._local_rank:
                print(text, flush=True)
            return
        parts = [self._stage, self.filename, self._local_rank]
        name = "-".join(str(part) for part in parts if part is not None)
        # Replace characters that some file systems do not allow.
        name = re.sub(r'[\\/:*?"<>|\s]+', "_", name) + ".txt"
        os.makedirs(self.dirpath, exist_ok=True)
        with open(os.path.join(self.dirpath, name), "a") as file:
            file.write(text)


# Lightning's name of the base class.
Profiler = PassThroughProfiler


class SimpleProfiler(PassThroughProfiler):
    """Record the seconds of each call of an action. extended=False makes a shorter table.

    recorded_durations   action → the seconds of each call

    100 % is the time since the profiler was created. If an action runs inside another, its
    time counts for both. GPUs run asynchronously: an action's time is how long the Python call
    took, not how long the GPU computed.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike | None = None,
        filename: str | None = None,
        extended: bool = True,
    ):
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = {}
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        """Start measuring an action. Raises UserError if it is running."""
        if action_name in self.current_actions:
            raise UserError(
                f"the profiler's action {action_name!r} has started already: stop it first."
            )
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Stop measuring an action. Raises UserError if it is not running."""
        end = time.perf_counter()
        if action_name not in self.current_actions:
            raise UserError(
                f"the profiler's action {action_name!r} has not started: start it first."
            )
        seconds = end - self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(seconds)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """The report as a table, sorted by total time, longest first."""
        title = f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"
        if not self.recorded_durations:
            return f"{title}: no action was measured\n"
        header, *rows = self._extended_rows() if self.extended else self._short_rows()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        rule = "-" * len(_table_line(header, widths))
        lines = [title, rule, _table_line(header, widths), rule]
        lines += [_table_line(row, widths) for row in rows]
        return "\n".join([*lines, rule]) + "\n"

    def _totals(self) -> list[tuple[str, int, float]]:
        """(action, calls, total seconds), the longest total first."""
        totals = [
            (name, len(durations), math.fsum(durations))
            for name, durations in self.recorded_durations.items()
        ]
        return sorted(totals, key=lambda total: total[2], reverse=True)

    def _extended_rows(self) -> list[tuple[str, ...]]:
        whole = time.perf_counter() - self.start_time
        totals = self._totals()
        calls = sum(calls for _, calls, _ in totals)
        rows = [
            ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"),
            ("Total", "-", f"{calls}", f"{whole:.5g}", "100 %"),
        ]
        for name, calls, seconds in totals:
            mean = f"{seconds / calls:.5g}"
            percentage = f"{100 * seconds / whole:.5g}"
            rows.append((name, mean, f"{calls}", f"{seconds:.5g}", percentage))
        return rows

    def _short_rows(self) -> list[tuple[str, ...]]:
        rows = [("Action", "Mean duration (s)", "Total time (s)")]
        for name, calls, seconds in self._totals():
            rows.append((name, f"{seconds / calls:.5g}", f"{seconds:.5g}"))
        return rows


def _table_line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    return "| " + " | ".join(padded) + " |"
