"""What does the Trainer want of a logger? That it takes metrics and hyperparameters, and knows its folder."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multigpu.files import atomic
from multigpu.trainer.yaml_text import yaml_text


class NoExperiment:
    """Stands for `logger.experiment` on all ranks but 0: every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __getitem__(self, index: Any) -> "NoExperiment":
        return self

    def __setitem__(self, index: Any, value: Any) -> None: ...


class Logger:
    """The base class of loggers: a subclass writes at least `log_metrics`.

    `is_global_zero` is set by the Trainer once the ranks are known: only rank 0 writes. `set_version` gives all ranks
    the version of rank 0, since the folder that it makes would be counted by the others.
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
        """The folder of all experiments, None if nothing is written on this machine."""
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
        """The object under the logger, with all that it can do."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep these numbers (floats, or tensors with one element) of this step."""
        raise NotImplementedError

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, *args: Any, **kwargs: Any
    ) -> None: ...
    def log_graph(self, model: Any, input_array: Any = None) -> None: ...
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None: ...
    def save(self) -> None: ...

    def finalize(self, status: str) -> None:
        """Called at the end of a run; `status` is "success" or "failed"."""
        self.save()


class DummyLogger(Logger):
    """It takes everything, and keeps nothing."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None: ...


class FolderLogger(Logger):
    """A logger that writes to <save_dir>/<name>/version_<version>, where `version` is one more than the last there."""

    def __init__(
        self,
        save_dir: str | os.PathLike,
        name: str | None,
        version: int | str | None,
        prefix: str,
    ):
        self._save_dir, self._name, self._version, self._prefix = (
            os.fspath(save_dir),
            name or "",
            version,
            prefix,
        )
        self._experiment: Any = None
        self.hparams: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_experiment": None}  # open files cannot be pickled

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
            numbers = [folder.name.split("_")[1] for folder in folders]
            self._version = (
                max((int(number) for number in numbers if number.isdigit()), default=-1) + 1
            )
        return self._version

    @property
    def log_dir(self) -> str:
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, version)

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics with their names' prefix. A tensor on a GPU is cloned: fetching its number would wait for it."""
        prefix = f"{self._prefix}-" if self._prefix else ""
        return {prefix + name: _number(value) for name, value in metrics.items()}

    def _keep_hparams(self, params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
        params = dict(vars(params) if isinstance(params, Namespace) else params or {})
        self.hparams.update(params)
        return params

    def _write_hparams(self) -> None:
        with atomic(Path(self.log_dir) / "hparams.yaml") as temporary:
            temporary.write_text(yaml_text(self.hparams), encoding="utf-8")


def _number(value: Any) -> Any:
    if not hasattr(value, "detach"):
        return value
    return value.detach().clone() if value.device.type != "cpu" else value.item()
