"""Checks that the model is a LightningModule with the steps that a stage needs."""

from typing import Any

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.module import LightningModule
from multigpu.trainer.refused import refuse
from multigpu.trainer.run import Run

REQUIRED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}
# Hooks of Lightning that are not called: refused.py says what to write instead.
REMOVED_HOOKS = (
    "configure_callbacks",
    "configure_sharded_model",
    "on_batch_end",
    "on_batch_start",
    "on_epoch_end",
    "on_epoch_start",
    "on_keyboard_interrupt",
    "on_pretrain_routine_end",
    "on_pretrain_routine_start",
)


def check_model(stage: str, model: Any) -> None:
    """Raises UserError unless `model` is a LightningModule with the methods `stage` needs."""
    if model is None:
        raise UserError(
            f"trainer.{stage}: no model was given, and none was given before: give a "
            f"LightningModule."
        )
    if isinstance(getattr(model, "_orig_mod", None), LightningModule):
        raise UserError(
            f"trainer.{stage}: the Trainer cannot call the steps of a compiled module: "
            f"compile its layers instead, with self.net = torch.compile(…)."
        )
    if not isinstance(model, LightningModule):
        raise UserError(
            f"trainer.{stage}: {type(model).__name__} is not a LightningModule: give a "
            f"subclass of multigpu.trainer.LightningModule."
        )
    for name in REQUIRED[stage]:
        if not is_overridden(name, model, LightningModule):
            raise UserError(
                f"{type(model).__name__} has no {name}, which trainer.{stage} needs: write it."
            )


def check_manual_optimization(run: Run) -> None:
    """Raises UserError for what only automatic optimization supports."""
    for name, least in (("gradient_clip_val", 0), ("accumulate_grad_batches", 1)):
        if (getattr(run.settings, name) or 0) > least:
            raise UserError(
                f"{name} is for automatic optimization: leave it out, and write in "
                f"training_step when self.clip_gradients and optimizer.step() are called."
            )
    if len(run.strategy.devices) > 1:
        raise UserError(
            f"{run.strategy.name} does not support manual optimization because it would "
            f"run training_step, and so optimizer.step(), once for each part of a batch: use "
            f"automatic optimization, or strategy='ddp'."
        )


def check_hooks(part: object) -> None:
    """Raises UserError if a module, data module or callback has a hook that is not called."""
    of_callbacks = () if isinstance(part, Callback) else ("on_exception",)
    for name in (*REMOVED_HOOKS, *of_callbacks):
        if callable(getattr(part, name, None)):
            refuse(name, type(part).__name__)
