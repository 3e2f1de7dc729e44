"""The base classes: Logger for all loggers, FolderLogger for those that write to a folder."""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from multigpu.trainer.callbacks import ModelCheckpoint


class NoExperiment:
    """`logger.experiment` on all ranks except 0. Its methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __getitem__(self, index: Any) -> NoExperiment:
        return self

    def __setitem__(self, index: Any, value: Any) -> None: ...


class Logger:
    """The base class of loggers. A subclass implements at least `log_metrics`.

    The Trainer sets `is_global_zero` when the ranks are known. Only rank 0 writes. The Trainer
    also sets rank 0's version on all ranks (`set_version`), because the other ranks would
    count the folder that rank 0 has created.
    """

    is_global_zero: bool = True
    _version: int | str | None = None

    @property
    def name(self) -> str | None:
        return None

    @property
    def version(self) -> int | str | None:
        return self._version

    def set_version(self, version: int | str | None) -> None:
        self._version = version

    @property
    def save_dir(self) -> str | None:
        """The folder of all experiments; None if nothing is written on this machine."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder of all versions of this experiment."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this version."""
        return None

    @property
    def experiment(self) -> Any:
        """The underlying object that does the logging."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the metrics of this step: floats, or tensors with one element."""
        raise NotImplementedError

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, *args: Any, **kwargs: Any
    ) -> None: ...
    def log_graph(self, model: nn.Module, input_array: Any = None) -> None: ...
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None: ...
    def save(self) -> None: ...

    def finalize(self, status: str) -> None:
        """Called at the end of a run; `status` is "success" or "failed"."""
        self.save()


class DummyLogger(Logger):
    """A logger that discards everything."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None: ...


class FolderLogger(Logger):
    """A logger that writes to <save_dir>/<name>/version_<version>.

    By default `version` is one more than the highest version in <save_dir>/<name>. A subclass
    can give the file of hyperparameters another name.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None,
        version: int | str | None,
        prefix: str,
    ):
        self._save_dir = os.fspath(save_dir)
        self._name = name or ""
        self._version = version
        self._prefix = prefix
        self._experiment: Any = None
        self.hparams: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Open files cannot be pickled.
        return vars(self) | {"_experiment": None}

    @property
    def name(self) -> str:
        return self._name

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self._save_dir, self._name)

    @property
    def version(self) -> int | str:
        if self._version is None:
            folders = Path(self.root_dir).glob("version_*/")
            versions = [folder.name.split("_")[1] for folder in folders]
            numbers = [int(version) for version in versions if version.isdigit()]
            self._version = max(numbers, default=-1) + 1
        return self._version

    @property
    def log_dir(self) -> str:
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, version)

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics without their graphs, with the prefix before their names."""
        prefix = f"{self._prefix}-" if self._prefix else ""
        return {prefix + name: _number(value) for name, value in metrics.items()}

    def _update_hparams(self, params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
        """Add these hyperparameters to `hparams`, and return them as a dict."""
        params = dict(vars(params) if isinstance(params, Namespace) else params or {})
        self.hparams.update(params)
        return params

    def _write_hparams(self) -> None:
        """Write the file of hyperparameters; without PyYAML, warn and write nothing."""
        try:
            from multigpu.trainer.loggers.hparams_file import write_hparams
        except ModuleNotFoundError as error:
            if error.name != "yaml":
                raise
            warnings.warn(
                f"{self.NAME_HPARAMS_FILE} is not written, because PyYAML is not installed: "
                f"pip install pyyaml.",
                stacklevel=2,
            )
            return
        write_hparams(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)


def _number(value: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    if value.device.type == "cpu":
        return value.item()
    # item() would wait for the GPU. A clone does not wait, and keeps the value of this step.
    return value.detach().clone()
