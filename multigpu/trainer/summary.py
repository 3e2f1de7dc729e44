"""What is told before the first step? The model's size and place to the reader, its hyperparameters to the loggers."""

from typing import Any

from multigpu.errors import pluralize


def introduce(trainer: Any) -> None:
    model = trainer.lightning_module
    if trainer.is_global_zero and trainer.enable_model_summary:
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        total, learn = sum(n for n, _ in sizes), sum(n for n, learns in sizes if learns)
        still = "" if total == learn else f", of which {learn:,} learn"
        trainer.print(
            f"{type(model).__name__}: {total:,} parameters{still}; {_where(trainer)}"
        )
    hyper: dict[str, Any] = {}
    for part in (model, trainer.datamodule):
        if part is not None and getattr(part, "_log_hyperparams", False):
            hyper |= part.hparams_initial
    for logger in trainer.loggers:
        if hyper:
            logger.log_hyperparams(hyper)
        logger.log_graph(model)
        logger.save()


def _where(trainer: Any) -> str:
    strategy = trainer.strategy
    kind = strategy.device.type
    return f"{strategy.name} on {pluralize(trainer.world_size, 'rank')}, {kind}, {trainer.precision_plugin.name}"
