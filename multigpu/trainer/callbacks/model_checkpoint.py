"""ModelCheckpoint: save checkpoints during training, and keep the best or the newest."""

from __future__ import annotations

import os
import warnings
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.checkpoint_files import (
    default_folder,
    fill_template,
    link_checkpoint,
    remove_checkpoint,
    unused_path,
)
from multigpu.trainer.callbacks.checkpoint_schedule import CheckpointSchedule
from multigpu.trainer.callbacks.monitor import (
    IS_BETTER,
    WORST,
    check_mode,
    missing_metric,
    to_score,
)
from multigpu.trainer.refused import refuse_arguments

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer

# The attributes that a checkpoint contains, with Lightning's names.
STATE = (
    "monitor",
    "best_model_score",
    "best_model_path",
    "current_score",
    "dirpath",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
# The attributes that are restored from a checkpoint, unless `dirpath` has changed.
RESTORED = (
    "best_model_score",
    "kth_best_model_path",
    "kth_value",
    "best_k_models",
    "last_model_path",
)


class ModelCheckpoint(Callback):
    """Save checkpoints to `dirpath`.

    The default folder is "checkpoints" in the logger's folder, or in default_root_dir.

    Without `monitor`, `save_top_k` is 1 to keep the newest checkpoint, -1 to keep all, or 0 to
    keep none. With `monitor`, the `save_top_k` checkpoints with the best metric are kept
    (`mode` "min" or "max"). `filename` can contain metrics: "{epoch}-{val_loss:.2f}" becomes
    "epoch=2-val_loss=0.31.ckpt", or "2-0.31.ckpt" without `auto_insert_metric_name`. With
    `enable_version_counter` a file of another run is not overwritten; the new file's name gets
    "-v1". `save_last` also keeps "last.ckpt", as a copy or, with "link", as a symbolic link.

    It saves every `every_n_epochs` epochs (default 1) or every `every_n_train_steps` optimizer
    steps. Only one of the two can be given. An epoch's checkpoint is written after the
    validation or, with `save_on_train_epoch_end`, at the end of the training epoch. By default
    it is written at the end if validation runs once per epoch.

    Raises UserError for invalid arguments, and for a metric that is not logged.
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
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        **refused: Any,
    ):
        refuse_arguments("ModelCheckpoint", refused)
        if save_top_k < -1:
            raise UserError(
                f"ModelCheckpoint(save_top_k={save_top_k}): "
                "give the number of checkpoints to keep, 0 for none, -1 for all."
            )
        if monitor is None and save_top_k > 1:
            raise UserError(
                f"ModelCheckpoint(save_top_k={save_top_k}) needs monitor=..., "
                "the metric that decides which checkpoints are best."
            )
        self.dirpath = os.path.realpath(os.path.expanduser(dirpath)) if dirpath else None
        self.filename = filename
        self.monitor = monitor
        self.mode = check_mode(mode, "ModelCheckpoint")
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self._enable_version_counter = enable_version_counter
        self._schedule = CheckpointSchedule(
            every_n_train_steps, every_n_epochs, save_on_train_epoch_end
        )
        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(WORST[mode])
        self.current_score: Tensor | None = None
        self.last_model_path = ""
        # 0, because before the first step there is nothing to save.
        self._last_global_step_saved = 0
        self._last_checkpoint_saved = ""
        self._saves_after_validation = False
        self._has_validated = False
        self._has_ended_epoch = False

    @property
    def every_n_epochs(self) -> int:
        return self._schedule.every_n_epochs

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._schedule.every_n_train_steps,
            every_n_epochs=self._schedule.every_n_epochs,
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state.

        If `dirpath` has changed, only `best_model_path` is restored, so nothing in the
        previous folder is deleted.
        """
        self.best_model_path = state_dict["best_model_path"]
        previous = state_dict.get("dirpath", self.dirpath)
        if previous != self.dirpath:
            if is_rank_zero():
                warnings.warn(
                    f"the checkpoints' folder was {previous} and is now {self.dirpath}: "
                    "the checkpoints in the previous folder are not deleted.",
                    stacklevel=2,
                )
            return
        for name in RESTORED:
            setattr(self, name, copy(state_dict.get(name, getattr(self, name))))

    # ---- hooks
    # ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = trainer.strategy.broadcast(self.dirpath or default_folder(trainer))
        writes = stage == "fit" and trainer.is_global_zero and self.save_top_k
        if writes and os.path.isdir(self.dirpath) and os.listdir(self.dirpath):
            warnings.warn(
                f"Checkpoint directory {self.dirpath} exists and is not empty.", stacklevel=2
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = False
        self._has_ended_epoch = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._schedule.due_after_batch(trainer):
            return
        monitors = self.monitor is not None
        # "epoch" and "step" are never missing: _monitor_candidates adds them.
        is_missing = monitors and self.monitor not in self._monitor_candidates(trainer)
        if is_missing and self._has_ended_epoch and self._all_metrics_are_logged(trainer):
            raise missing_metric(self.monitor, trainer.callback_metrics, "ModelCheckpoint")
        is_last = batch_idx + 1 == trainer.num_training_batches
        if is_missing or (
            monitors and is_last and self._schedule.waits_for_validation(trainer)
        ):
            self._saves_after_validation = True
        elif not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_and_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_ended_epoch = True
        skip = self._should_skip_saving_checkpoint(trainer)
        if not skip and self._schedule.saves_on_train_epoch_end(trainer):
            self._save_after_epoch(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._has_validated = True
        skip = self._should_skip_saving_checkpoint(trainer)
        if skip or self._schedule.saves_on_train_epoch_end(trainer):
            return
        if self._saves_after_validation:
            self._saves_after_validation = False
            self._save_topk_and_last(trainer)
        else:
            self._save_after_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.save_last and not self._last_checkpoint_saved and not trainer.fast_dev_run:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def last_checkpoints(self, trainer: Trainer) -> set[str]:
        """The files that are named as last checkpoints, of this run and of earlier ones."""
        folder = Path(self.dirpath or default_folder(trainer))
        pattern = f"{self.CHECKPOINT_NAME_LAST}*{self.FILE_EXTENSION}"
        return {self.last_model_path, *map(str, folder.glob(pattern))}

    # ---- names
    # ----------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """The path for these metrics; a missing metric counts as 0.

        `ver` adds "-v<ver>" at the end. `prefix` adds "<prefix>-" at the start.
        """
        template = filename or self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        parts = [fill_template(template, metrics, equals)]
        if prefix is not None:
            parts.insert(0, prefix)
        if ver is not None:
            parts.append(f"v{ver}")
        name = self.CHECKPOINT_JOIN_CHAR.join(parts) + self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _get_metric_interpolated_filepath_name(
        self,
        trainer: Trainer,
        metrics: dict[str, Any],
        replaced: str,
        filename: str | None = None,
    ) -> str:
        """Rank 0's path for these metrics, broadcast to all ranks.

        With the version counter, no file exists there, or the path is `replaced`.
        """
        if not trainer.is_global_zero:
            path = ""
        elif self._enable_version_counter:
            path = unused_path(
                lambda ver: self.format_checkpoint_name(metrics, filename, ver),
                self.STARTING_VERSION,
                replaced,
            )
        else:
            path = self.format_checkpoint_name(metrics, filename)
        return trainer.strategy.broadcast(path)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Any]:
        """The metrics for the file's name.

        epoch and step are converted to int, because the user may have logged them as floats.
        """
        metrics = dict(trainer.callback_metrics)
        counters = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        for name, counter in counters.items():
            metrics[name] = torch.tensor(int(metrics.get(name, counter)))
        return metrics

    # ---- saving
    # ---------------------------------------------------------------------------------

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return (
            trainer.state.fn != "fit"
            or bool(trainer.sanity_checking)
            or bool(trainer.fast_dev_run)
            or self._last_global_step_saved == trainer.global_step
        )

    def _all_metrics_are_logged(self, trainer: Trainer) -> bool:
        """Whether each hook that could log the metric has run once."""
        return self._has_validated or not trainer.enable_validation

    def _save_topk_and_last(self, trainer: Trainer) -> None:
        metrics = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, metrics)
        self._save_last_checkpoint(trainer, metrics)

    def _save_after_epoch(self, trainer: Trainer) -> None:
        metrics = self._monitor_candidates(trainer)
        if self._schedule.due_after_epoch(trainer):
            self._save_topk_checkpoint(trainer, metrics)
        saved_now = self._last_global_step_saved == trainer.global_step
        if saved_now or (self.save_last == "link" and self._last_checkpoint_saved):
            self._save_last_checkpoint(trainer, metrics)

    def _save_topk_checkpoint(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, metrics)
        elif self.monitor in metrics:
            self._save_monitor_checkpoint(trainer, metrics)
        elif self._all_metrics_are_logged(trainer):
            raise missing_metric(self.monitor, metrics, "ModelCheckpoint")
        else:
            warnings.warn(
                f"ModelCheckpoint(monitor={self.monitor!r}): "
                "the metric is not logged yet, so nothing is saved.",
                stacklevel=2,
            )

    def _save_none_monitor_checkpoint(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        previous = self.best_model_path
        self.best_model_path = self._get_metric_interpolated_filepath_name(
            trainer, metrics, previous
        )
        self._save_checkpoint(trainer, self.best_model_path)
        if self.save_top_k == 1:
            remove_checkpoint(trainer, previous, self.best_model_path, self.dirpath)

    def _save_monitor_checkpoint(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        current = to_score(metrics[self.monitor])
        is_full = 0 < self.save_top_k <= len(self.best_k_models)
        if is_full and not self.check_monitor_top_k(trainer, current):
            if self.verbose:
                trainer.print(
                    f"{self.monitor} = {current:.5f} is not among the best {self.save_top_k}."
                )
            return
        replaced = self.kth_best_model_path if is_full else ""
        path = self._get_metric_interpolated_filepath_name(trainer, metrics, replaced)
        # A metric that was not reduced differs between ranks, but best_k_models must not
        # differ. Therefore all ranks use rank 0's path and score.
        path, current = trainer.strategy.broadcast((path, current))
        self._update_best(path, current, replaced)
        if self.verbose:
            best = f"{self.best_model_score:.5f}"
            trainer.print(f"{self.monitor} = {current:.5f} (best {best}): saved as {path}")
        self._save_checkpoint(trainer, path)
        remove_checkpoint(trainer, replaced, path, self.dirpath)

    def _update_best(self, path: str, current: Tensor, replaced: str) -> None:
        """Add `path` with its score to best_k_models, and remove `replaced`."""
        if torch.isnan(current):
            current = torch.tensor(WORST[self.mode])
        self.current_score = current
        self.best_k_models.pop(replaced, None)
        self.best_k_models[path] = current
        best, worst = (min, max) if self.mode == "min" else (max, min)
        self.best_model_path = best(self.best_k_models, key=self.best_k_models.__getitem__)
        self.best_model_score = self.best_k_models[self.best_model_path]
        if self.save_top_k <= len(self.best_k_models):
            self.kth_best_model_path = worst(
                self.best_k_models, key=self.best_k_models.__getitem__
            )
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a checkpoint with this score would be kept. All ranks return the same."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        kth_best = self.best_k_models[self.kth_best_model_path].to(current.device)
        is_better = IS_BETTER[self.mode](current, kth_best)
        return trainer.strategy.reduce_boolean_decision(bool(is_better))

    def _save_last_checkpoint(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        if not self.save_last:
            return
        previous = self.last_model_path
        # Set before saving, because the state in the checkpoint contains the path.
        self.last_model_path = self._get_metric_interpolated_filepath_name(
            trainer, metrics, previous, self.CHECKPOINT_NAME_LAST
        )
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k:
            link_checkpoint(trainer, self._last_checkpoint_saved, self.last_model_path)
        else:
            self._save_checkpoint(trainer, self.last_model_path)
        remove_checkpoint(trainer, previous, self.last_model_path, self.dirpath)

    def _save_checkpoint(self, trainer: Trainer, path: str) -> None:
        trainer.save_checkpoint(path, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = path
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)
