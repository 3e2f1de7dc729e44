"""TensorBoardLogger: writes metrics for TensorBoard with torch's SummaryWriter."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.trainer.loggers.logger import FolderLogger, NoExperiment

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter

# Steps are kept in memory. They are written if there are this many, or the first is this old.
MAX_STEPS_IN_MEMORY = 100
MAX_SECONDS_IN_MEMORY = 10.0


class TensorBoardLogger(FolderLogger):
    """Writes an event file and hparams.yaml to <save_dir>/<name>/version_<N>[/<sub_dir>].

    With `default_hp_metric`, log_hyperparams without metrics logs -1 as "hp_metric", because
    TensorBoard's table of hyperparameters needs a metric. With `log_graph`, the model's graph
    is written; the model must then have an example_input_array. Other arguments are passed to
    SummaryWriter. The first write raises UserError if TensorBoard is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike | None = None,
        **kwargs: Any,
    ):
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._kwargs = kwargs
        self.sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        # The steps that are not written yet, as (metrics, step, time).
        self._rows: list[tuple[dict[str, Any], int | None, float]] = []

    @property
    def log_dir(self) -> str:
        path = os.path.join(super().log_dir, self.sub_dir or "").rstrip(os.sep)
        return os.path.expanduser(os.path.expandvars(path))

    @property
    def experiment(self) -> SummaryWriter | NoExperiment:
        """torch's SummaryWriter on rank 0; elsewhere, an object that does nothing."""
        if not self.is_global_zero:
            return NoExperiment()
        if self._experiment is None:
            _do_without_tensorflow()
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "TensorBoardLogger needs TensorBoard: pip install tensorboard, "
                    "or use CSVLogger."
                ) from None
            self._experiment = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the metrics of this step.

        A value that is a dict becomes curves in one diagram (SummaryWriter.add_scalars).
        """
        if not self.is_global_zero:
            return
        metrics = self._prefixed(metrics)
        for name in [name for name, value in metrics.items() if isinstance(value, dict)]:
            self.experiment.add_scalars(name, metrics.pop(name), step)
        self._rows.append((metrics, step, time.time()))
        seconds = time.time() - self._rows[0][2]
        if len(self._rows) >= MAX_STEPS_IN_MEMORY or seconds > MAX_SECONDS_IN_MEMORY:
            self._write()

    def _write(self) -> None:
        if not self._rows:
            return
        events = self.experiment._get_file_writer()
        from tensorboard.compat.proto.summary_pb2 import Summary

        rows = self._rows
        self._rows = []
        for metrics, step, seconds in rows:
            try:
                values = [
                    Summary.Value(tag=name, simple_value=float(value))
                    for name, value in metrics.items()
                ]
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"TensorBoardLogger: a metric must be a number; one of {metrics} is not."
                ) from None
            events.add_summary(Summary(value=values), step, seconds)

    def log_hyperparams(
        self,
        params: Mapping[str, Any] | Namespace | None,
        metrics: Mapping[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Log hyperparameters for TensorBoard's table, with the metrics of this run."""
        if not self.is_global_zero:
            return
        params = _flatten(self._update_hparams(params))
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        self.log_metrics(metrics, step)
        events = self.experiment._get_file_writer()
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(params, dict(metrics)):
            events.add_summary(summary, step)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        if not self._log_graph or not self.is_global_zero:
            return
        example = input_array
        if example is None:
            example = getattr(model, "example_input_array", None)
        if example is None:
            raise UserError(
                "TensorBoardLogger(log_graph=True) needs the model's example_input_array."
            )
        self.experiment.add_graph(model, example)

    def save(self) -> None:
        if not self.is_global_zero:
            return
        self._write()
        self.experiment.flush()
        if not os.path.exists(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)):
            self._write_hparams()

    def finalize(self, status: str) -> None:
        if self._experiment is None and not self._rows:
            return
        self.save()
        self._experiment.close()


def _do_without_tensorflow() -> None:
    """Prevent TensorBoard from importing TensorFlow to open a file.

    The import takes seconds. If a module `tensorboard.compat.notf` exists, TensorBoard
    uses its own file functions.
    """
    if "tensorflow" not in sys.modules:
        name = "tensorboard.compat.notf"
        sys.modules.setdefault(name, ModuleType(name))


def _flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A flat dict: nested names become "outer/inner", values other than numbers strings."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = f"{prefix}{name}"
        if isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{key}/")
            continue
        if getattr(value, "shape", None) == ():
            value = value.item()
        flat[key] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
