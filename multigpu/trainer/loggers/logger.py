"""The base classes: Logger for all loggers, FolderLogger for those that write to a folder."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoExperiment:
    """`logger.experiment` on all ranks except 0. Its methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Logger:
    """The base class of loggers. A subclass implements at least `log_metrics`.

    The Trainer sets `is_global_zero` when the ranks are known. Only rank 0 writes. The Trainer
    also sets rank 0's version on all ranks (`set_version`), because the other ranks would
    count the folder that rank 0 has created.

    save_dir   the folder of all experiments; None if nothing is written on this machine
    root_dir   the folder of all versions of this experiment
    log_dir    the folder of this version
    """

    is_global_zero: bool = True
    _version: int | str | None = None
    name: str | None = None
    save_dir: str | None = None
    root_dir: str | None = None
    log_dir: str | None = None

    @property
    def version(self) -> int | str | None:
        return self._version

    def set_version(self, version: int | str | None) -> None:
        self._version = version

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
    def save(self) -> None: ...

    def finalize(self, status: str) -> None:
        """Called at the end of a run; `status` is "success" or "failed"."""
        self.save()


class DummyLogger(Logger):
    """A logger that discards everything."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None: ...


class FolderLogger(Logger):
    """A logger that writes to <save_dir>/<name>/version_<version>.

    By default `version` is one more than the highest version in <save_dir>/<name>.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None,
        version: int | str | None,
    ):
        self.save_dir = os.fspath(save_dir)
        self.name = name or ""
        self.root_dir = os.path.join(self.save_dir, self.name)
        self._version = version
        self._experiment: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_experiment": None}  # open files cannot be pickled

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

    @property
    def experiment(self) -> Any:
        """The writer on rank 0; elsewhere, an object that does nothing.

        The first read creates the folder.
        """
        if not self.is_global_zero:
            return NoExperiment()
        if self._experiment is None:
            self._experiment = self._open()
        return self._experiment

    def _open(self) -> Any:
        """Make the writer."""
        raise NotImplementedError

    def finalize(self, status: str) -> None:
        if self._experiment is not None:  # a run that logged nothing leaves no folder
            self.save()
