"""CSVLogger: writes metrics.csv with one row per step and one column per metric."""

import csv
import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multigpu.files import atomic, report_full_disk
from multigpu.trainer.loggers.logger import FolderLogger, NoExperiment


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
        rows = [
            {name: v.item() if hasattr(v, "item") else v for name, v in row.items()}
            for row in self.metrics
        ]
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
    """Writes metrics.csv and hparams.yaml to <save_dir>/<name>/version_<N>.

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

    @property
    def experiment(self) -> ExperimentWriter | NoExperiment:
        """The writer of metrics.csv on rank 0; elsewhere, an object that does nothing."""
        if not self.is_global_zero:
            return NoExperiment()
        return self._writer()

    def _writer(self) -> ExperimentWriter:
        """The writer. The first call creates the folder."""
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir)
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.is_global_zero:
            return
        rows = self.experiment.metrics
        step = len(rows) if step is None else step
        rows.append(self._prefixed(metrics) | {"step": step})
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace | None = None) -> None:
        if self.is_global_zero:
            self._update_hparams(params)
            self._writer()
            self._write_hparams()

    def save(self) -> None:
        self.experiment.save()

    def finalize(self, status: str) -> None:
        # A run that logged nothing leaves no folder.
        if self._experiment is not None:
            self.save()
