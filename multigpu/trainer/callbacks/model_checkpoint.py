"""ModelCheckpoint: save checkpoints during training, and keep the best or the newest."""

import os
import re
import warnings
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.callbacks.monitor import (
    IS_BETTER,
    WORST,
    check_mode,
    missing_metric,
    to_score,
)
from multigpu.trainer.refused import refuse_arguments

# The attributes that a checkpoint contains. The names are Lightning's.
STATE = ("best_model_path", "best_model_score", "best_k_models", "last_model_path", "dirpath")


class ModelCheckpoint(Callback):
    """Save checkpoints to `dirpath`.

    The default folder is "checkpoints" in the logger's folder, or in default_root_dir.

    Without `monitor`, `save_top_k` is 1 to keep the newest checkpoint, -1 to keep all, or 0 to
    keep none. With `monitor`, the `save_top_k` checkpoints with the best metric are kept
    (`mode` "min" or "max"). `filename` can contain metrics: "{epoch}-{val_loss:.2f}" becomes
    "epoch=2-val_loss=0.31.ckpt", or "2-0.31.ckpt" without `auto_insert_metric_name`. With
    `enable_version_counter` a file of another run is not overwritten; the new file's name gets
    "-v1". `save_last` also keeps a copy as "last.ckpt".

    It saves every `every_n_epochs` epochs (default 1) or every `every_n_train_steps` optimizer
    steps. Only one of the two can be given. An epoch's checkpoint is written after the
    validation or, with `save_on_train_epoch_end`, at the end of the training epoch. By default
    it is written at the end if validation runs once per epoch.

    Raises UserError for invalid arguments, and for a metric that is not logged.
    """

    monitors = True
    saves = True
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"

    def __init__(
        self,
        dirpath: str | os.PathLike | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
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
        if save_last not in (None, True, False):
            raise UserError(f"ModelCheckpoint(save_last={save_last!r}): give True or False.")
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
        if every_n_train_steps is every_n_epochs is None:
            every_n_epochs = 1
        self.every_n_train_steps = every_n_train_steps or 0
        self.every_n_epochs = every_n_epochs or 0
        if self.every_n_train_steps and self.every_n_epochs:
            raise UserError(
                "ModelCheckpoint accepts every_n_train_steps or every_n_epochs: for two "
                "intervals, use two ModelCheckpoints."
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
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.last_model_path = ""
        self._last_global_step_saved = 0  # before the first step there is nothing to save
        self._has_validated = False

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=None,  # a part of Lightning's key
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state.

        If `dirpath` has changed, only `best_model_path` is restored, so nothing in the
        previous folder is deleted.
        """
        self.best_model_path = state_dict["best_model_path"]
        if self.dirpath not in (None, state_dict["dirpath"]):
            return
        for name in STATE:
            setattr(self, name, copy(state_dict[name]))

    # ---- hooks: when to save --------------------------------------------------------------

    def setup(self, trainer, pl_module, stage):
        self.dirpath = trainer.strategy.broadcast(
            self.dirpath or os.path.join(trainer.log_dir, "checkpoints")
        )

    def on_train_start(self, trainer, pl_module):
        self._has_validated = False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        every = self.every_n_train_steps
        if every and trainer.global_step % every == 0 and not self._skips(trainer):
            metrics = self._metrics(trainer)
            self._save_top_k(trainer, metrics)
            self._save_last(trainer, metrics)

    def on_train_epoch_end(self, trainer, pl_module):
        if not self._skips(trainer) and self._saves_on_train_epoch_end(trainer):
            self._save_after_epoch(trainer)

    def on_validation_end(self, trainer, pl_module):
        self._has_validated = not trainer.sanity_checking
        if not self._skips(trainer) and not self._saves_on_train_epoch_end(trainer):
            self._save_after_epoch(trainer)

    def on_train_end(self, trainer, pl_module):
        if self.save_last and not self._last_global_step_saved and not trainer.fast_dev_run:
            self._save_last(trainer, self._metrics(trainer))

    def _skips(self, trainer: Any) -> bool:
        return (
            trainer.state.fn != "fit"
            or bool(trainer.sanity_checking)
            or bool(trainer.fast_dev_run)
            or self._last_global_step_saved == trainer.global_step
        )

    def _saves_on_train_epoch_end(self, trainer: Any) -> bool:
        """Whether to save at the end of the training epoch instead of after the validation."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False
        return not sum(trainer.num_val_batches) or trainer.val_check_interval == 1.0

    # ---- files ----------------------------------------------------------------------------

    def last_checkpoints(self, trainer: Any) -> set[str]:
        """The files that are named as last checkpoints, of this run and of earlier ones."""
        folder = Path(self.dirpath or os.path.join(trainer.log_dir, "checkpoints"))
        pattern = f"{self.CHECKPOINT_NAME_LAST}*{self.FILE_EXTENSION}"
        return {self.last_model_path, *map(str, folder.glob(pattern))}

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """The path for these metrics; a missing metric counts as 0. `ver` adds "-v<ver>".

        Raises UserError if a format does not fit its value.
        """
        template = filename or self.filename or "{epoch}-{step}"

        def text_of(field: re.Match) -> str:
            name, spec = field[1], field[2] or ""
            try:
                value = format(metrics.get(name, 0), spec)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"ModelCheckpoint(filename={template!r}): "
                    f"{field[0]} cannot be formatted: {error}."
                ) from None
            return f"{name}={value}" if self.auto_insert_metric_name else value

        name = re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", text_of, template)
        name += f"-v{ver}" if ver is not None else ""
        return os.path.join(self.dirpath or "", name + self.FILE_EXTENSION)

    def _path(
        self,
        trainer: Any,
        metrics: dict[str, Any],
        replaced: str,
        filename: str | None = None,
    ) -> str:
        """Rank 0's path for these metrics, broadcast to all ranks.

        With the version counter, no file exists there, or the path is `replaced`.
        """
        path = ""
        if trainer.is_global_zero:
            path = self.format_checkpoint_name(metrics, filename)
            version = 1
            while self._enable_version_counter and os.path.exists(path) and path != replaced:
                path = self.format_checkpoint_name(metrics, filename, version)
                version += 1
        return trainer.strategy.broadcast(path)

    def _metrics(self, trainer: Any) -> dict[str, Any]:
        """The metrics for the file's name.

        epoch and step are converted to int, because the user may have logged them as floats.
        """
        metrics = dict(trainer.callback_metrics)
        counters = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        for name, counter in counters.items():
            metrics[name] = torch.tensor(int(metrics.get(name, counter)))
        return metrics

    # ---- saving ---------------------------------------------------------------------------

    def _save_after_epoch(self, trainer: Any) -> None:
        metrics = self._metrics(trainer)
        every = self.every_n_epochs
        if every and (trainer.current_epoch + 1) % every == 0:
            self._save_top_k(trainer, metrics)
        if self._last_global_step_saved == trainer.global_step:
            self._save_last(trainer, metrics)

    def _save_top_k(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if self.save_top_k == 0:
            return
        if self.monitor is None:
            previous = self.best_model_path
            self.best_model_path = self._path(trainer, metrics, previous)
            self._write(trainer, self.best_model_path)
            if self.save_top_k == 1:
                self._remove(trainer, previous, self.best_model_path)
        elif self.monitor in metrics:
            self._save_monitored(trainer, metrics)
        elif self._has_validated or not trainer.enable_validation:
            raise missing_metric(self.monitor, metrics, "ModelCheckpoint")
        else:
            warnings.warn(
                f"ModelCheckpoint(monitor={self.monitor!r}): "
                "the metric is not logged yet, so nothing is saved.",
                stacklevel=2,
            )

    def _save_monitored(self, trainer: Any, metrics: dict[str, Any]) -> None:
        current = to_score(metrics[self.monitor])
        replaced = ""
        if 0 < self.save_top_k <= len(self.best_k_models):  # full: the worst leaves
            replaced = self._worst()
            is_better = bool(IS_BETTER[self.mode](current, self.best_k_models[replaced]))
            if not trainer.strategy.reduce_boolean_decision(is_better):
                if self.verbose:
                    trainer.print(
                        f"{self.monitor} = {current:.5f} is not among the best "
                        f"{self.save_top_k}."
                    )
                return
        path = self._path(trainer, metrics, replaced)
        # A metric that was not reduced differs between ranks, but best_k_models must not
        # differ. Therefore all ranks use rank 0's path and score.
        path, current = trainer.strategy.broadcast((path, current))
        self._update_best(path, current, replaced)
        if self.verbose:
            best = f"{self.best_model_score:.5f}"
            trainer.print(f"{self.monitor} = {current:.5f} (best {best}): saved as {path}")
        self._write(trainer, path)
        self._remove(trainer, replaced, path)

    def _update_best(self, path: str, current: Tensor, replaced: str) -> None:
        """Add `path` with its score to best_k_models, and remove `replaced`."""
        if torch.isnan(current):
            current = torch.tensor(WORST[self.mode])
        kept = self.best_k_models
        kept.pop(replaced, None)
        kept[path] = current
        best = min if self.mode == "min" else max
        self.best_model_path = best(kept, key=kept.__getitem__)
        self.best_model_score = kept[self.best_model_path]

    def _worst(self) -> str:
        """The path of the worst checkpoint that is kept."""
        worst = max if self.mode == "min" else min
        return worst(self.best_k_models, key=self.best_k_models.__getitem__)

    def _save_last(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if not self.save_last:
            return
        previous = self.last_model_path
        # Set before saving, because the state in the checkpoint contains the path.
        self.last_model_path = self._path(
            trainer, metrics, previous, self.CHECKPOINT_NAME_LAST
        )
        self._write(trainer, self.last_model_path)
        self._remove(trainer, previous, self.last_model_path)

    def _write(self, trainer: Any, path: str) -> None:
        trainer.save_checkpoint(path, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step

    def _remove(self, trainer: Any, path: str, newer: str) -> None:
        """Delete the file `path`, on rank 0.

        The file is kept if `newer` is the same file, if the run resumed from it, or if it is
        outside `dirpath`.
        """
        if not path or not trainer.is_global_zero:
            return
        old = Path(os.path.abspath(path))
        kept = {os.path.abspath(other) for other in (newer, trainer.ckpt_path) if other}
        if str(old) not in kept and Path(os.path.abspath(self.dirpath)) in old.parents:
            old.unlink(missing_ok=True)
