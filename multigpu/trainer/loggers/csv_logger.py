"""CSVLogger: writes metrics.csv with one row per step and one column per metric."""

import csv
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multigpu.files import atomic, report_full_disk
from multigpu.trainer.loggers.logger import FolderLogger


class ExperimentWriter:
    """The file metrics.csv, and the rows that are not yet written to it.

    New rows are appended. If there is a new column, the file is rewritten.
    """

    def __init__(self, log_dir: str):
        self.log_dir = log_dir
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self.metrics_file_path = os.path.join(log_dir, "metrics.csv")
        os.makedirs(log_dir, exist_ok=True)
        if os.path.exists(self.metrics_file_path):
            warnings.warn(
                f"{self.metrics_file_path} is from another run and is replaced.", stacklevel=3
            )
            os.remove(self.metrics_file_path)

    def save(self) -> None:
        """Write the new rows."""
        rows = self.metrics
        self.metrics = []
        new_keys = set().union(*rows) - set(self.metrics_keys)
        if new_keys:
            self.metrics_keys = sorted(new_keys.union(self.metrics_keys))
            if os.path.exists(self.metrics_file_path):
                with open(self.metrics_file_path, newline="") as file:
                    rows = [*csv.DictReader(file), *rows]
            with atomic(self.metrics_file_path) as temporary:
                self._append(temporary, rows, header=True)
        elif rows:
            with report_full_disk(self.metrics_file_path):
                self._append(Path(self.metrics_file_path), rows)

    def _append(self, path: Path, rows: list[dict[str, Any]], header: bool = False) -> None:
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            if header:
                writer.writeheader()
            writer.writerows(rows)


class CSVLogger(FolderLogger):
    """Writes metrics.csv to <save_dir>/<name>/version_<N>.

    The columns are sorted by name. Rows are written every `flush_logs_every_n_steps` steps and
    at the end. `prefix` is put before every metric's name.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ):
        super().__init__(save_dir, name, version, prefix)
        self._flush_logs_every_n_steps = flush_logs_every_n_steps

    def _open(self) -> ExperimentWriter:
        return ExperimentWriter(self.log_dir)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.is_global_zero:
            return
        rows = self.experiment.metrics
        step = len(rows) if step is None else step
        # A tensor can change in place until the rows are written.
        numbers = {
            self._prefix + name: value.item() if hasattr(value, "item") else value
            for name, value in metrics.items()
        }
        rows.append(numbers | {"step": step})
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    def save(self) -> None:
        self.experiment.save()
