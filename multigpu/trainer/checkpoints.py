"""Checkpoints: what they contain, and how a run resumes. checkpoint_io.py has the files.

Their keys are Lightning's, and what an exact resume needs is under "multigpu".
load_from_checkpoint therefore reads the files of both libraries; fit resumes from those that
this Trainer has written.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from multigpu.elastic.checkpoint_file import random_states, set_random_states
from multigpu.errors import UserError
from multigpu.launch.rendezvous import fail_together
from multigpu.trainer import checkpoint_io
from multigpu.trainer.checkpoint_io import LIGHTNING_VERSION, OWN_KEY
from multigpu.trainer.run import Run

# The attributes of FitLoop that a checkpoint contains.
LOOP = ("batches_done", "total_batches", "todo", "epoch_done")

# ---- contents ------------------------------------------------------------------------------


def compose(run: Run) -> dict[str, Any]:
    """The contents of a checkpoint of the current state.

    "epoch" is the index of the running epoch, from 0. All ranks must call it, because each
    rank has its own random states and hooks can contain collectives.
    """
    module = run.module
    state = run.state
    schedulers = [config.scheduler for config in run.schedulers]
    content: dict[str, Any] = {
        "epoch": state.current_epoch,
        "global_step": state.global_step,
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": module.state_dict(),
        "callbacks": {
            callback.state_key: state
            for callback in run.callbacks
            if (state := callback.state_dict())
        },
        "optimizer_states": [optimizer.state_dict() for optimizer in run.optimizers],
        "lr_schedulers": [scheduler.state_dict() for scheduler in schedulers],
        OWN_KEY: _progress(run),
    }
    if run.precision.scaler is not None:
        content["MixedPrecision"] = run.precision.scaler.state_dict()
    if module.hparams:
        content["hyper_parameters"] = dict(module.hparams)
        if module._hparams_name:
            content["hparams_name"] = module._hparams_name
    datamodule = run.datamodule
    if datamodule is not None and (state := datamodule.state_dict()):
        content[type(datamodule).__qualname__] = state
    run.call("on_save_checkpoint", content)
    return content


def _progress(run: Run) -> dict[str, Any]:
    """What an exact resume needs beside Lightning's keys."""
    fit = run.fit_loop
    random = (random_states(), fit.epoch_start_states if fit else None)
    metrics = run.state.metrics.callback
    # At an epoch's end ReduceLROnPlateau steps after all callbacks have saved. A resumed run
    # must do that step, and needs the metrics for it.
    monitored = {config.monitor for config in run.schedulers if config.reduce_on_plateau}
    return {
        "random": run.strategy.gather_objects(random),
        "monitored": {name: float(metrics[name]) for name in monitored & metrics.keys()},
        "batches_that_stepped": run.state.batches_that_stepped,
        **{name: getattr(fit, name) if fit else 0 for name in LOOP},
    }


# ---- files --------------------------------------------------------------------------------


def resolve_path(run: Run, ckpt_path: str | Path | None) -> str | None:
    """The path of the checkpoint file, the same on all ranks.

    "last" is the newest of the callbacks' last checkpoints, also of an earlier run; None, with
    a warning, if there is none. Raises UserError if no callback has saved a best one.
    """
    if ckpt_path == "last":
        return run.strategy.broadcast(_newest_last(run))
    if ckpt_path != "best":
        return None if ckpt_path is None else str(Path(ckpt_path))
    paths = (getattr(callback, "best_model_path", "") for callback in run.callbacks)
    path = next(filter(None, paths), "")
    if not path:
        raise UserError(
            "ckpt_path is 'best', but no ModelCheckpoint has saved such a checkpoint: "
            "give the path of a file.",
            already_reported=not run.strategy.is_global_zero,
        )
    return path


def _newest_last(run: Run) -> str | None:
    """The newest existing file among the callbacks' `last_checkpoints`."""
    paths: set[str] = set()
    for callback in run.callbacks:
        if hasattr(callback, "last_checkpoints"):
            paths |= callback.last_checkpoints(run.trainer)
    newest = max(filter(os.path.exists, paths), key=os.path.getmtime, default=None)
    if newest is None:
        run.state.warn_once(
            "ckpt_path is 'last', but there is no last checkpoint, so none is loaded: "
            "ModelCheckpoint(save_last=True) writes one."
        )
    return newest


# ---- restoring ----------------------------------------------------------------------------


def restore_model(
    run: Run, path: str | None, weights_only: bool | None
) -> dict[str, Any] | None:
    """Read the checkpoint and restore module, data module and callbacks.

    Returns the checkpoint's contents. If one rank cannot read the file, all ranks raise an
    error.
    """
    if path is None:
        return None
    with fail_together(run.strategy.world, run.strategy.gather_objects):
        content = checkpoint_io.read(path, weights_only=weights_only)
    training = run.state.fn == "fit"
    if training:
        run.report(f"Restoring states from the checkpoint path at {path}")
    module = run.module
    module.on_load_checkpoint(content)
    checkpoint_io.load_weights(module, content, path, strict=True)
    datamodule = run.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in content:
        datamodule.load_state_dict(content[type(datamodule).__qualname__])
    states = content.get("callbacks", {})
    for callback in run.callbacks:
        callback.on_load_checkpoint(run.trainer, module, content)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if not training:
        run.report(f"Loaded model weights from the checkpoint at {path}")
    return content


def restore_training(run: Run, content: dict[str, Any]) -> None:
    """Restore optimizers, schedulers, loss scaler, counters and random states.

    Raises UserError if the file contains weights only, was written by Lightning, has another
    number of optimizers, or more epochs than max_epochs.
    """
    path = run.state.ckpt_path
    _restore_optimizers(run, content, path)
    progress = content[OWN_KEY]
    epochs, limit = content["epoch"] + progress["epoch_done"], run.settings.max_epochs
    if limit not in (None, -1) and epochs > limit:
        raise UserError(
            f"{path} has {epochs} epochs, and max_epochs is {limit}: "
            "set it to the number of epochs of the whole run, with those of the file."
        )
    fit = run.fit_loop
    state = run.state
    state.global_step = content["global_step"]
    state.batches_that_stepped = progress["batches_that_stepped"]
    state.current_epoch = content["epoch"]
    fit.total_batches = progress["total_batches"]
    fit.batches_done = progress["batches_done"]
    fit.todo = progress["todo"]
    monitored = {name: torch.tensor(value) for name, value in progress["monitored"].items()}
    run.state.metrics.callback.update(monitored)
    if progress["epoch_done"]:
        # The schedulers that monitor a metric had not stepped when the file was written.
        if monitored:
            fit.step_schedulers("epoch", plateau=True)
        state.current_epoch += 1
    _restore_random_states(run, progress["random"])
    run.report(f"Restored all states from the checkpoint at {path}")


def _restore_optimizers(run: Run, content: dict[str, Any], path: str | Path) -> None:
    if "optimizer_states" not in content:
        raise UserError(
            f"{path} contains weights only, so training cannot resume from it: "
            "load it with load_from_checkpoint."
        )
    if OWN_KEY not in content:
        raise UserError(
            f"{path} was written by Lightning, and training resumes there: load its weights "
            f"with load_from_checkpoint, or run the program with Lightning itself."
        )
    states = content["optimizer_states"]
    if len(states) != len(run.optimizers):
        raise UserError(
            f"{path} has {len(states)} optimizers, but this run has {len(run.optimizers)}."
        )
    for optimizer, state in zip(run.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    schedulers = [config.scheduler for config in run.schedulers]
    for scheduler, state in zip(schedulers, content.get("lr_schedulers", []), strict=False):
        scheduler.load_state_dict(state)
    scaler = run.precision.scaler
    if scaler is not None and "MixedPrecision" in content:
        scaler.load_state_dict(content["MixedPrecision"])


def _restore_random_states(run: Run, states: list[tuple[dict, dict | None]]) -> None:
    """Restore this rank's random states.

    If the run resumes within an epoch, FitLoop first starts the loader with the states from
    the epoch's start. The loader then shuffles as before.
    """
    fit = run.fit_loop
    within_epoch = fit.batches_done > 0
    if len(states) != run.strategy.world.size:
        if within_epoch:
            warnings.warn(
                "the checkpoint was written by another number of ranks, "
                "so the rest of this epoch's data comes in another order.",
                stacklevel=2,
            )
        return
    now, epoch_start = states[run.strategy.world.rank]
    fit.epoch_start_states = epoch_start if within_epoch else None
    fit.states_after_skip = now if within_epoch else None
    if not within_epoch:
        set_random_states(now)
