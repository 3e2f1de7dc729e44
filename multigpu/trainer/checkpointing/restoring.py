"""Restore a run from a checkpoint: the model in every stage, the training state in fit."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multigpu.checkpoint import set_random_states
from multigpu.errors import UserError
from multigpu.launch.rendezvous import fail_together
from multigpu.trainer.checkpointing.progress import own_progress, read_progress
from multigpu.trainer.checkpointing.reading import read_checkpoint
from multigpu.trainer.checkpointing.weights import load_weights

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def resolve_path(trainer: Trainer, ckpt_path: str | Path | None) -> str | None:
    """The path of the checkpoint file, the same on all ranks.

    "last" is the newest of the callbacks' last checkpoints, also of an earlier run; None, with
    a warning, if there is none. Raises UserError if ModelCheckpoint has saved no best one.
    """
    if ckpt_path == "last":
        return trainer.strategy.broadcast(_newest_last(trainer))
    if ckpt_path != "best":
        return None if ckpt_path is None else str(Path(ckpt_path))
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not path:
        raise UserError(
            "ckpt_path is 'best', but no ModelCheckpoint has saved such a checkpoint: "
            "give the path of a file.",
            already_reported=not trainer.is_global_zero,
        )
    return path


def _newest_last(trainer: Trainer) -> str | None:
    """The newest existing file among the callbacks' `last_checkpoints`."""
    paths: set[str] = set()
    for callback in trainer.callbacks:
        if hasattr(callback, "last_checkpoints"):
            paths |= callback.last_checkpoints(trainer)
    newest = max(filter(os.path.exists, paths), key=os.path.getmtime, default=None)
    if newest is None:
        trainer.state.warn_once(
            "ckpt_path is 'last', but there is no last checkpoint, so none is loaded: "
            "ModelCheckpoint(save_last=True) writes one."
        )
    return newest


def restore_model(trainer: Trainer, path: str | None) -> dict[str, Any] | None:
    """Read the checkpoint and restore module, data module and callbacks.

    Returns the checkpoint's contents. If one rank cannot read the file, all ranks raise an
    error.
    """
    if path is None:
        return None
    with fail_together(trainer.strategy.world, trainer.strategy.gather_objects):
        content = read_checkpoint(path, weights_only=trainer.state.weights_only)
    training = trainer.state.fn == "fit"
    if training:
        trainer.report(f"Restoring states from the checkpoint path at {path}")
    module = trainer.lightning_module
    module.on_load_checkpoint(content)
    load_weights(module, content, path, module.strict_loading)
    datamodule = trainer.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in content:
        datamodule.load_state_dict(content[type(datamodule).__qualname__])
    states = content.get("callbacks", {})
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, content)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if not training:
        trainer.report(f"Loaded model weights from the checkpoint at {path}")
    return content


def restore_training(trainer: Trainer, content: dict[str, Any], path: str | Path) -> None:
    """Restore optimizers, schedulers, loss scaler, counters and random states.

    Raises UserError if the file contains weights only, or another number of optimizers.
    """
    _restore_optimizers(trainer, content, path)
    own = own_progress(content)
    saved = read_progress(content)
    fit = trainer.state.fit_loop
    progress = trainer.state.progress
    progress.global_step = content["global_step"]
    progress.batches_that_stepped = saved.batches_that_stepped
    progress.current_epoch = saved.epoch
    if trainer.max_epochs not in (None, -1) and saved.epoch > trainer.max_epochs:
        raise UserError(
            f"{path} was written in epoch {saved.epoch}, but max_epochs is "
            f"{trainer.max_epochs}: give more."
        )
    fit.total_batches = saved.total_batches
    fit.batches_done = saved.batches_done
    if own:
        fit.pending_phase = own["pending_phase"]
    monitored = own.get("monitored", {})
    trainer.callback_metrics.update(
        {name: torch.tensor(value) for name, value in monitored.items()}
    )
    if saved.epoch_is_complete:
        # The schedulers that monitor a metric had not stepped when the file was written.
        if monitored and trainer.lightning_module.automatic_optimization:
            fit.schedule("epoch", plateau=True)
        progress.current_epoch += 1
    _restore_random_states(trainer, own.get("random", []))
    trainer.report(f"Restored all states from the checkpoint at {path}")


def _restore_optimizers(trainer: Trainer, content: dict[str, Any], path: str | Path) -> None:
    if "optimizer_states" not in content:
        raise UserError(
            f"{path} contains weights only, so training cannot resume from it: "
            "load it with load_from_checkpoint."
        )
    states = content["optimizer_states"]
    if len(states) != len(trainer.optimizers):
        raise UserError(
            f"{path} has {len(states)} optimizers, but this run has {len(trainer.optimizers)}."
        )
    for optimizer, state in zip(trainer.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler, state in zip(schedulers, content.get("lr_schedulers", []), strict=False):
        scheduler.load_state_dict(state)
    scaler = trainer.precision_plugin.scaler
    if scaler is not None and "MixedPrecision" in content:
        scaler.load_state_dict(content["MixedPrecision"])


def _restore_random_states(trainer: Trainer, states: list[tuple[dict, dict | None]]) -> None:
    """Restore this rank's random states.

    If the run resumes within an epoch, FitLoop first starts the loader with the states from
    the epoch's start. The loader then shuffles as before.
    """
    fit = trainer.state.fit_loop
    within_epoch = fit.batches_done > 0
    if len(states) != trainer.world_size:
        if within_epoch:
            warnings.warn(
                "the checkpoint was written by another number of ranks, "
                "so the rest of this epoch's data comes in another order.",
                stacklevel=2,
            )
        return
    now, epoch_start = states[trainer.global_rank]
    fit.epoch_start_states = epoch_start if within_epoch else None
    fit.states_after_skip = now if within_epoch else None
    if not within_epoch:
        set_random_states(now)
