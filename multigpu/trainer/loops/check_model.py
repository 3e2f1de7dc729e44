"""Checks that the model is a LightningModule with the steps that a stage needs."""

from typing import Any

from multigpu.errors import UserError
from multigpu.trainer.hooks import is_overridden
from multigpu.trainer.module import LightningModule

REQUIRED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
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
