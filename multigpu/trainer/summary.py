"""Prints the model's summary before the first step, and logs the hyperparameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multigpu.errors import pluralize

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def print_summary_and_log_hparams(trainer: Trainer) -> None:
    """Print the summary on rank 0; give loggers the hyperparameters and the graph."""
    if trainer.is_global_zero and trainer.enable_model_summary:
        _print_summary(trainer)
    model = trainer.lightning_module
    hparams: dict[str, Any] = {}
    for part in (model, trainer.datamodule):
        if part is not None and getattr(part, "_log_hyperparams", False):
            hparams |= part.hparams_initial
    for logger in trainer.loggers:
        if hparams:
            logger.log_hyperparams(hparams)
        logger.log_graph(model)
        logger.save()


def _print_summary(trainer: Trainer) -> None:
    model = trainer.lightning_module
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = f"{total:,} parameters"
    if trainable != total:
        size += f", {trainable:,} trainable"
    strategy = trainer.strategy
    ranks = pluralize(trainer.world_size, "rank")
    place = (
        f"{strategy.name} on {ranks}, {strategy.device.type}, {trainer.precision_plugin.name}"
    )
    trainer.print(f"{type(model).__name__}: {size}; {place}")
