"""CSVLogger: writes metrics.csv with one row per step and one column per metric."""

import csv
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multigpu.files import atomic, report_full_disk
from multigpu.trainer.loggers.logger import FolderLogger
from multigpu.trainer.refused import refuse_arguments


class CSVLogger(FolderLogger):
    """Writes metrics.csv to <save_dir>/<name>/version_<N>.

    The columns are sorted by name. Rows are written every `flush_logs_every_n_steps` steps and
    at the end. They are appended; if there is a new column, the file is written again.
    `experiment` is the path of the file.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        flush_logs_every_n_steps: int = 100,
        **refused: Any,
    ):
        refuse_arguments("CSVLogger", refused)
        super().__init__(save_dir, name, version)
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._rows: list[dict[str, Any]] = []  # not yet written
        self._columns: list[str] = []

    def _open(self) -> Path:
        path = Path(self.log_dir, "metrics.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = []
        if path.exists():
            warnings.warn(f"{path} is from another run and is replaced.", stacklevel=3)
            path.unlink()
        return path

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.is_global_zero:
            return
        step = len(self._rows) if step is None else step
        # A tensor can change in place until the rows are written.
        numbers = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in metrics.items()
        }
        self._rows.append(numbers | {"step": step})
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    def save(self) -> None:
        """Write the new rows."""
        if not self._rows:
            return
        path = self.experiment
        rows = self._rows
        self._rows = []
        if new := set().union(*rows) - set(self._columns):
            self._columns = sorted(new.union(self._columns))
            if path.exists():
                with open(path, newline="") as file:
                    rows = [*csv.DictReader(file), *rows]
            with atomic(path) as temporary:
                self._append(temporary, rows, header=True)
        else:
            with report_full_disk(path):
                self._append(path, rows)

    def _append(self, path: Path, rows: list[dict[str, Any]], header: bool = False) -> None:
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self._columns)
            if header:
                writer.writeheader()
            writer.writerows(rows)

    def finalize(self, status: str) -> None:
        self.save()
