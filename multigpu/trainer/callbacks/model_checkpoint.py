"""Which checkpoints does a run keep, and when does it write them? The best by a metric, or the last ones."""

import os
import warnings
from copy import copy
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.callbacks.checkpoint_files import filled, folder, link, remove, unused
from multigpu.trainer.callbacks.checkpoint_times import CheckpointTimes
from multigpu.trainer.callbacks.monitor import BETTER, WORST, checked_mode, missing, score

# What a checkpoint keeps of this callback: Lightning's names.
STATE = (
    *(
        "monitor",
        "best_model_score",
        "best_model_path",
        "current_score",
        "dirpath",
        "best_k_models",
    ),
    *("kth_best_model_path", "kth_value", "last_model_path"),
)


class ModelCheckpoint(CheckpointTimes):
    """Save checkpoints to `dirpath` (by default the logger's folder, else default_root_dir, + "checkpoints").

    Without `monitor` the newest is kept (`save_top_k` 1), all (-1) or none (0); with `monitor` the `save_top_k` best
    by that metric (`mode` "min" or "max"). `filename` may hold metrics: "{epoch}-{val_loss:.2f}" becomes
    "epoch=2-val_loss=0.31.ckpt", or "2-0.31.ckpt" without `auto_insert_metric_name`; a file of another run is not
    overwritten, the new one gets "-v1" (`enable_version_counter`). `save_last` keeps "last.ckpt" too, as a copy or,
    with "link", as a symbolic link.

    It saves every `every_n_epochs` (default 1), every `every_n_train_steps` optimizer steps, or when
    `train_time_interval` has passed: one of the three. An epoch's checkpoint stands after the validation, or at the end
    of the training epoch (`save_on_train_epoch_end`; by default the latter if validation runs once an epoch).
    Raises UserError for arguments that contradict each other, and for a metric that nobody logged.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ):
        times = (
            every_n_train_steps,
            train_time_interval,
            every_n_epochs,
            save_on_train_epoch_end,
        )
        super().__init__(*times, save_on_exception)
        self.dirpath = os.path.realpath(os.path.expanduser(dirpath)) if dirpath else None
        self.filename, self.monitor, self.verbose, self.save_last = (
            filename,
            monitor,
            verbose,
            save_last,
        )
        self.save_top_k, self.save_weights_only = save_top_k, save_weights_only
        self._enable_version_counter = enable_version_counter
        self.mode, self.auto_insert_metric_name = (
            checked_mode(mode, "ModelCheckpoint"),
            auto_insert_metric_name,
        )
        self.best_k_models: dict[str, Tensor] = {}
        self.kth_value = torch.tensor(WORST[mode])
        self.current_score: Tensor | None = None
        self.best_model_score: Tensor | None = None
        self.best_model_path = self.kth_best_model_path = self.last_model_path = ""
        if save_top_k < -1:
            raise UserError(
                f"ModelCheckpoint(save_top_k={save_top_k}): give a number, 0 for none or -1 for all."
            )
        if monitor is None and save_top_k > 1:
            raise UserError(
                f"ModelCheckpoint(save_top_k={save_top_k}) needs monitor=..., the metric to choose by."
            )

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state; if the folder is another one now, only `best_model_path`, since no file there is ours."""
        self.best_model_path = state_dict["best_model_path"]
        if state_dict.get("dirpath", self.dirpath) != self.dirpath:
            if is_rank_zero():
                warnings.warn(
                    f"the checkpoints' folder was {state_dict['dirpath']} and is {self.dirpath}: those there are left alone.",
                    stacklevel=2,
                )
            return
        for name in (
            "best_model_score",
            "kth_best_model_path",
            "kth_value",
            "best_k_models",
            "last_model_path",
        ):
            setattr(self, name, copy(state_dict.get(name, getattr(self, name))))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.dirpath = trainer.strategy.broadcast(self.dirpath or folder(trainer))
        writes = stage == "fit" and trainer.is_global_zero and self.save_top_k
        if writes and os.path.isdir(self.dirpath) and os.listdir(self.dirpath):
            warnings.warn(
                f"Checkpoint directory {self.dirpath} exists and is not empty.", stacklevel=2
            )

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """The path for these metrics; one that is missing counts as 0. `ver` adds "-v<ver>", `prefix` "<prefix>-"."""
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        parts = [prefix, filled(template, metrics, equals), None if ver is None else f"v{ver}"]
        name = (
            self.CHECKPOINT_JOIN_CHAR.join(part for part in parts if part is not None)
            + self.FILE_EXTENSION
        )
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _metrics(self, trainer: Any) -> dict[str, Any]:
        """The metrics for the file's name, with epoch and step as whole numbers even if the user logged them."""
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        logged = {
            name: trainer.callback_metrics[name]
            for name in at
            if name in trainer.callback_metrics
        }
        return trainer.callback_metrics | {
            name: torch.tensor(int(logged.get(name, at[name]))) for name in at
        }

    def _save_top_k(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            previous, self.best_model_path = (
                self.best_model_path,
                self._path(trainer, metrics, self.best_model_path),
            )
            self._save(trainer, self.best_model_path)
            if self.save_top_k == 1:
                remove(trainer, previous, self.best_model_path, self.dirpath)
        elif self.monitor in metrics:
            self._save_if_among_the_best(trainer, metrics)
        elif self._all_logged(trainer):
            raise missing(self.monitor, metrics, "ModelCheckpoint")
        else:
            warnings.warn(
                f"ModelCheckpoint(monitor={self.monitor!r}): not logged yet, nothing saved.",
                stacklevel=2,
            )

    def _save_if_among_the_best(self, trainer: Any, metrics: dict[str, Any]) -> None:
        current = score(metrics[self.monitor])
        full = 0 < self.save_top_k <= len(self.best_k_models)
        if full and not self.check_monitor_top_k(trainer, current):
            if self.verbose:
                trainer.print(
                    f"{self.monitor} = {current:.5f} is not among the best {self.save_top_k}."
                )
            return
        outgoing = self.kth_best_model_path if full else ""
        # Rank 0's path and score go to all ranks: a metric that was not reduced differs, and the lists must not.
        path, current = trainer.strategy.broadcast(
            (self._path(trainer, metrics, outgoing), current)
        )
        self.best_k_models.pop(outgoing, None)
        worst = torch.tensor(WORST[self.mode])
        self.best_k_models[path] = self.current_score = (
            worst if torch.isnan(current) else current
        )
        best, last = (min, max) if self.mode == "min" else (max, min)
        self.best_model_path = best(self.best_k_models, key=self.best_k_models.__getitem__)
        self.best_model_score = self.best_k_models[self.best_model_path]
        if self.save_top_k <= len(self.best_k_models):
            self.kth_best_model_path = last(
                self.best_k_models, key=self.best_k_models.__getitem__
            )
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        if self.verbose:
            trainer.print(
                f"{self.monitor} = {current:.5f} (best {self.best_model_score:.5f}): saved as {path}"
            )
        self._save(trainer, path)
        remove(trainer, outgoing, path, self.dirpath)

    def check_monitor_top_k(self, trainer: Any, current: Tensor | None = None) -> bool:
        """Whether a checkpoint with this score would be kept; the ranks agree."""
        if (
            current is None
            or self.save_top_k == -1
            or len(self.best_k_models) < self.save_top_k
        ):
            return current is not None
        better = BETTER[self.mode](
            current, self.best_k_models[self.kth_best_model_path].to(current.device)
        )
        return trainer.strategy.reduce_boolean_decision(bool(better))

    def _path(
        self, trainer: Any, metrics: dict[str, Any], ours: str, filename: str | None = None
    ) -> str:
        """Rank 0's path for these metrics: one that no file has, or `ours`, which may be overwritten."""
        if not trainer.is_global_zero:
            path = ""
        elif self._enable_version_counter:
            path = unused(
                lambda ver: self.format_checkpoint_name(metrics, filename, ver),
                self.STARTING_VERSION,
                ours,
            )
        else:
            path = self.format_checkpoint_name(metrics, filename)
        return trainer.strategy.broadcast(path)

    def _save_last(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if not self.save_last:
            return
        path = self._path(trainer, metrics, self.last_model_path, self.CHECKPOINT_NAME_LAST)
        previous, self.last_model_path = (
            self.last_model_path,
            path,
        )  # before saving: it is part of the state
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k:
            link(trainer, self._last_checkpoint_saved, path)
        else:
            self._save(trainer, path)
        remove(trainer, previous, path, self.dirpath)

    def _save(self, trainer: Any, path: str) -> None:
        trainer.save_checkpoint(path, self.save_weights_only)
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, path
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
