"""The contents of a checkpoint: Lightning's keys alone.

What only this Trainer needs, for an exact resume, is in the fit loop's own state. Lightning's
Trainer can resume from this Trainer's checkpoints. This Trainer can resume from Lightning's
checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multigpu.checkpoint import random_states
from multigpu.trainer.checkpointing.progress import loop_progress

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer

# The checkpoints have the format of this version of Lightning, and the Trainer has its names.
LIGHTNING_VERSION = "2.6.6"
# The keys that a checkpoint does not have if it contains only weights.
TRAINING_KEYS = ("callbacks", "optimizer_states", "lr_schedulers", "MixedPrecision")


def compose_checkpoint(trainer: Trainer, weights_only: bool) -> dict[str, Any]:
    """The contents of a checkpoint of the current state.

    "epoch" is the index of the running epoch, from 0. All ranks must call it, because each
    rank has its own random states and hooks can contain collectives.
    """
    fit = trainer.state.fit_loop
    epoch_start = fit.epoch_start_states if fit else None
    random = trainer.strategy.gather_objects((random_states(), epoch_start))
    own = {
        "batches_done": fit.batches_done if fit else 0,
        "pending_phase": fit.pending_phase if fit else "",
        "random": random,
        "monitored": _monitored_values(trainer),
    }
    module = trainer.lightning_module
    content: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": module.state_dict(),
        "loops": loop_progress(trainer, own),
    }
    if not weights_only:
        content |= _training_states(trainer)
    datamodule = trainer.datamodule
    for part in (module, datamodule):
        if part is not None and part.hparams:
            content[part.CHECKPOINT_HYPER_PARAMS_KEY] = dict(part.hparams)
            if name := getattr(part, "_hparams_name", None):
                content[part.CHECKPOINT_HYPER_PARAMS_NAME] = name
    if datamodule is not None and (state := datamodule.state_dict()):
        content[type(datamodule).__qualname__] = state
    with trainer.state.running_hook("on_save_checkpoint"):
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, content)
        module.on_save_checkpoint(content)
    return content


def _training_states(trainer: Trainer) -> dict[str, Any]:
    """The states of callbacks, optimizers, schedulers and of the loss scaler."""
    callbacks = {}
    for callback in trainer.callbacks:
        if state := callback.state_dict():
            callbacks[callback.state_key] = state
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    states: dict[str, Any] = {
        "callbacks": callbacks,
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [scheduler.state_dict() for scheduler in schedulers],
    }
    scaler = trainer.precision_plugin.scaler
    if scaler is not None:
        states["MixedPrecision"] = scaler.state_dict()
    return states


def _monitored_values(trainer: Trainer) -> dict[str, float]:
    """The metrics that ReduceLROnPlateau schedulers monitor.

    At an epoch's end these schedulers step after all callbacks have saved. A resumed run must
    therefore do that step, and needs the metrics for it.
    """
    metrics = trainer.callback_metrics
    names = {
        config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau
    }
    return {name: float(metrics[name]) for name in names if name in metrics}
