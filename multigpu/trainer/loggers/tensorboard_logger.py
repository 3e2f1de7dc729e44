"""TensorBoardLogger: writes metrics for TensorBoard with torch's SummaryWriter."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from multigpu.errors import UserError
from multigpu.trainer.loggers.logger import FolderLogger
from multigpu.trainer.refused import REFUSED, refuse_arguments

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(FolderLogger):
    """Writes an event file to <save_dir>/<name>/version_<N>.

    Other arguments are passed to SummaryWriter. The first write raises UserError if
    TensorBoard is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        **kwargs: Any,
    ):
        super().__init__(save_dir, name, version)
        refused = {name: kwargs.pop(name) for name in REFUSED.keys() & kwargs.keys()}
        refuse_arguments("TensorBoardLogger", refused)
        self._kwargs = kwargs

    def _open(self) -> SummaryWriter:
        _do_without_tensorflow()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "TensorBoardLogger needs TensorBoard: pip install tensorboard, "
                "or use CSVLogger."
            ) from None
        return SummaryWriter(log_dir=self.log_dir, **self._kwargs)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            try:
                self.experiment.add_scalar(name, float(value), step)
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"TensorBoardLogger: a metric must be a number; {name} is {value!r}."
                ) from None

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, *args: Any, **kwargs: Any
    ) -> None:
        """Write the hyperparameters as a text, "hparams"."""
        values = vars(params) if isinstance(params, Namespace) else params or {}
        lines = (f"    {name}: {value}" for name, value in values.items())
        self.experiment.add_text("hparams", "\n".join(lines))

    def save(self) -> None:
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.close()


def _do_without_tensorflow() -> None:
    """Prevent TensorBoard from importing TensorFlow to open a file.

    The import takes seconds. If a module `tensorboard.compat.notf` exists, TensorBoard
    uses its own file functions.
    """
    if "tensorflow" not in sys.modules:
        name = "tensorboard.compat.notf"
        sys.modules.setdefault(name, ModuleType(name))
