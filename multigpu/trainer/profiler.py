"""Where does the time of a run go? A profiler measures the Trainer's actions by name."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from multigpu.errors import UserError

_NOTHING = nullcontext()


class PassThroughProfiler:
    """Measures nothing, and costs next to nothing: the Trainer's default."""

    def __init__(self, dirpath: str | os.PathLike | None = None, filename: str | None = None):
        self.dirpath, self.filename = dirpath, filename
        self._stage: str | None = None
        self._local_rank: int | None = None

    def setup(
        self, stage: str, local_rank: int | None = None, log_dir: str | None = None
    ) -> None:
        """Called before a run: its stage ("fit", ...), this process's rank on its node, where files may be written."""
        self._stage, self._local_rank, self.dirpath = (
            stage,
            local_rank,
            self.dirpath or log_dir,
        )

    def teardown(self, stage: str | None) -> None: ...
    def start(self, action_name: str) -> None: ...
    def stop(self, action_name: str) -> None: ...

    def profile(self, action_name: str) -> AbstractContextManager:
        """Measure a `with` block under this name."""
        return _NOTHING

    def summary(self) -> str:
        """The report as text."""
        return ""

    def describe(self) -> None:
        """Print the report on each node's first process, or write it to `filename` in `dirpath`, a file a process."""
        text = self.summary()
        if not text:
            return
        if not (self.filename and self.dirpath):
            if not self._local_rank:
                print(text, flush=True)
            return
        parts = (self._stage, self.filename, self._local_rank)
        name = "-".join(str(part) for part in parts if part is not None)
        os.makedirs(self.dirpath, exist_ok=True)
        with open(
            os.path.join(self.dirpath, re.sub(r'[\\/:*?"<>|\s]+', "_", name) + ".txt"), "a"
        ) as file:
            file.write(text)


Profiler = PassThroughProfiler


class SimpleProfiler(PassThroughProfiler):
    """Counts every action's calls and seconds. Without `extended` the table has no calls and no percentages.

    A percentage is of the time since the profiler was made. Actions within one another count in both.
    GPUs run behind Python: an action's time is what Python waited, not what the GPU worked.
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
        self.totals: dict[str, list[float]] = {}  # name: calls, seconds
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        """Begin an action. Raises UserError if it runs already."""
        if action_name in self.current_actions:
            raise UserError(
                f"the profiler's action {action_name!r} has started already: stop it first."
            )
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """End an action. Raises UserError if it does not run."""
        end = time.perf_counter()
        if action_name not in self.current_actions:
            raise UserError(f"the profiler's action {action_name!r} has not started.")
        total = self.totals.setdefault(action_name, [0, 0.0])
        total[0] += 1
        total[1] += end - self.current_actions.pop(action_name)

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        title = f"{self._stage.upper()} Profiler Report" if self._stage else "Profiler Report"
        if not self.totals:
            return f"{title}: no action was measured\n"
        spent = time.perf_counter() - self.start_time
        actions = sorted(self.totals.items(), key=lambda action: action[1][1], reverse=True)
        calls = sum(n for n, _ in self.totals.values())
        rows = [("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")]
        rows.append(("Total", "-", f"{calls:.0f}", f"{spent:.5g}", "100 %"))
        rows += [
            (a, f"{s / n:.5g}", f"{n:.0f}", f"{s:.5g}", f"{100 * s / spent:.5g}")
            for a, (n, s) in actions
        ]
        if not self.extended:
            rows = [(row[0], row[1], row[3]) for row in rows[:1] + rows[2:]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |"
            for row in rows
        ]
        rule = "-" * len(lines[0])
        return "\n".join([title, rule, lines[0], rule, *lines[1:], rule]) + "\n"
