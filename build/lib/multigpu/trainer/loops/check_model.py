"""Checks that the model is a LightningModule with the steps that a stage needs."""

import inspect
import warnings
from typing import Any

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.module import LightningModule

REQUIRED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}
# Hooks that Lightning 1.x called → the hooks that are called instead, as in Lightning 2.
REMOVED = {
    "on_epoch_start": "on_train_epoch_start, or on_validation_epoch_start",
    "on_epoch_end": "on_train_epoch_end, or on_validation_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "on_keyboard_interrupt": "on_exception",
    "tbptt_split_batch": "training_step, with manual optimization",
    "get_progress_bar_dict": "get_metrics of a ProgressBar",
}


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
    if stage == "predict":
        _check_prediction(model)
    # The class decides: a wrapper of the base's own method on the instance overrides nothing.
    if all(
        getattr(type(model), name) is not getattr(LightningModule, name)
        for name in ("configure_model", "configure_sharded_model")
    ):
        raise UserError(
            f"{type(model).__name__} has configure_model and configure_sharded_model, an "
            f"older name of the same hook: leave configure_sharded_model out."
        )


def _check_prediction(model: LightningModule) -> None:
    """Raises UserError if the model has neither predict_step nor forward."""
    name = type(model).__name__
    if model.predict_step is None:
        raise UserError(f"{name}.predict_step is None: write it, or leave it out.")
    has_step = is_overridden("predict_step", model, LightningModule)
    if not has_step and not is_overridden("forward", model, LightningModule):
        raise UserError(
            f"{name} has no predict_step and no forward, and trainer.predict needs one of "
            f"them: write it."
        )


def check_training_step(model: LightningModule) -> None:
    """Raises UserError for Lightning 1.x's training_step, which got an optimizer's index.

    It got the index only if there were several optimizers: an argument with a default is left
    at its default.
    """
    index = inspect.signature(model.training_step).parameters.get("optimizer_idx")
    if index is not None and index.default is index.empty:
        raise UserError(
            f"{type(model).__name__}.training_step has an argument optimizer_idx, which only "
            f"Lightning 1.x gave: leave it out, set self.automatic_optimization = False, and "
            f"step each optimizer yourself."
        )


def warn_of_removed_hooks(part: object) -> None:
    """Warn if a module, data module or callback has a hook that only Lightning 1.x called."""
    for name, today in REMOVED.items():
        if callable(getattr(part, name, None)) and is_rank_zero():
            warnings.warn(
                f"{type(part).__name__}.{name} is a hook of Lightning 1.x and is not called: "
                f"write {today} instead.",
                stacklevel=3,
            )
