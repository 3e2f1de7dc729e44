"""How do metrics get into TensorBoard's curves? Through torch's SummaryWriter, several scalars an event."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from multigpu.errors import UserError
from multigpu.trainer.loggers.logger import FolderLogger

ROWS, SECONDS = 100, 10.0  # how many steps, and how long, wait in memory


class TensorBoardLogger(FolderLogger):
    """Writes an event file and hparams.yaml to <save_dir>/<name>/version_<N>[/<sub_dir>].

    `default_hp_metric`: log_hyperparams without metrics logs "hp_metric" -1, as TensorBoard's table of hyperparameters
    wants a metric. `log_graph` writes the model's graph if it has an example_input_array. Other arguments go to
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
        self._log_graph, self._default_hp_metric, self._kwargs = (
            log_graph,
            default_hp_metric,
            kwargs,
        )
        self.sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._rows: list[tuple[dict[str, Any], int | None, float]] = []

    @property
    def log_dir(self) -> str:
        return os.path.expanduser(
            os.path.expandvars(os.path.join(super().log_dir, self.sub_dir or "")).rstrip(
                os.sep
            )
        )

    @property
    def experiment(self) -> Any:
        """torch.utils.tensorboard.SummaryWriter on rank 0; on others an object whose methods do nothing."""
        if not self.is_global_zero:
            return super().experiment
        if self._experiment is None:
            _without_tensorflow()
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "TensorBoardLogger needs TensorBoard: pip install tensorboard, or take CSVLogger."
                ) from None
            self._experiment = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep these numbers. A dict as a value becomes curves in one diagram (SummaryWriter.add_scalars)."""
        if not self.is_global_zero:
            return
        metrics = self._prefixed(metrics)
        for name in [name for name, value in metrics.items() if isinstance(value, dict)]:
            self.experiment.add_scalars(name, metrics.pop(name), step)
        self._rows.append((metrics, step, time.time()))
        if len(self._rows) >= ROWS or time.time() - self._rows[0][2] > SECONDS:
            self._write()

    def _write(self) -> None:
        if not self._rows:
            return
        events = self.experiment._get_file_writer()
        from tensorboard.compat.proto.summary_pb2 import Summary

        rows, self._rows = self._rows, []
        for metrics, step, when in rows:
            try:
                values = [
                    Summary.Value(tag=name, simple_value=float(value))
                    for name, value in metrics.items()
                ]
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"TensorBoardLogger: a metric is a number, not one of {metrics}."
                ) from None
            events.add_summary(Summary(value=values), step, when)

    def log_hyperparams(
        self,
        params: Mapping[str, Any] | Namespace | None,
        metrics: Mapping[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Show these hyperparameters in TensorBoard's table, with the metrics that they led to (default: -1)."""
        if not self.is_global_zero:
            return
        params = _flat(self._keep_hparams(params))
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

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        if self._log_graph and self.is_global_zero:
            example = (
                getattr(model, "example_input_array", None)
                if input_array is None
                else input_array
            )
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
        if not os.path.exists(os.path.join(self.log_dir, "hparams.yaml")):
            self._write_hparams()

    def finalize(self, status: str) -> None:
        if self._experiment is None and not self._rows:
            return
        self.save()
        self._experiment.close()


def _without_tensorflow() -> None:
    """TensorBoard would import TensorFlow where it is installed, for seconds, only to open a file.

    A module of this name tells it to take its own functions.
    """
    if "tensorflow" not in sys.modules:
        sys.modules.setdefault(
            "tensorboard.compat.notf", ModuleType("tensorboard.compat.notf")
        )


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as "outer/inner"; what is no number or text as its text."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        value = vars(value) if isinstance(value, Namespace) else value
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            value = value.item() if getattr(value, "shape", None) == () else value
            flat[f"{prefix}{name}"] = (
                value if isinstance(value, bool | int | float | str) else str(value)
            )
    return flat
