"""Prints the model's summary before the first step, and logs the hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from multigpu.errors import UserError, pluralize
from multigpu.trainer.callbacks import ModelSummary

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


def print_summary_and_log_hparams(trainer: Trainer) -> None:
    """Print the summary on rank 0; give loggers the hyperparameters and the graph.

    Raises UserError if the module and the data module have the same hyperparameter with other
    values.
    """
    depth = next((cb.max_depth for cb in trainer.callbacks if isinstance(cb, ModelSummary)), 1)
    if trainer.is_global_zero and trainer.enable_model_summary and depth:
        _print_summary(trainer, depth)
    model = trainer.lightning_module
    hparams: dict[str, Any] = {}
    for part in (model, trainer.datamodule):
        if part is not None and getattr(part, "_log_hyperparams", False):
            added = part.hparams_initial
            for name in hparams.keys() & added.keys():
                if not _is_same(hparams[name], added[name]):
                    raise UserError(
                        f"the hyperparameter {name!r} is {hparams[name]!r} in the module and "
                        f"{added[name]!r} in the data module: rename one of them."
                    )
            hparams |= added
    for logger in trainer.loggers:
        if hparams:
            logger.log_hyperparams(hparams)
        logger.log_graph(model)
        logger.save()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two hyperparameters are equal; of tensors and arrays, only the same object."""
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return one is other
    return type(one) is type(other) and one == other


def _print_summary(trainer: Trainer, depth: int) -> None:
    strategy = trainer.strategy
    ranks = pluralize(trainer.world_size, "rank")
    trainer.print(summarize(trainer.lightning_module, depth))
    trainer.print(
        f"{strategy.name} on {ranks}, {strategy.device.type}, {trainer.precision_plugin.name}"
    )


def summarize(model: nn.Module, max_depth: int = 1) -> str:
    """A table of the submodules with their parameters, and the totals below it.

    max_depth   1: the modules that are attributes of the model; 2: also their parts; -1: all

    The size in MB (10⁶ bytes) is that of the parameters. A lazy parameter counts as 0.
    """
    rows = [
        (name, type(part).__name__, f"{_count(part.parameters()):,}", _mode(part))
        for name, part in model.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    if own := _count(model.parameters(recurse=False)):
        rows.append(("other params", "n/a", f"{own:,}", "n/a"))
    parameters = list(model.parameters())
    trainable = _count(p for p in parameters if p.requires_grad)
    total = _count(parameters)
    size = sum(p.numel() * p.element_size() for p in parameters if not is_lazy(p)) / 1e6
    totals = [
        (f"{trainable:,}", "Trainable params"),
        (f"{total - trainable:,}", "Non-trainable params"),
        (f"{total:,}", "Total params"),
        (f"{size:.3f}", "Total estimated model params size (MB)"),
    ]
    table = _table([("", "Name", "Type", "Params", "Mode"), *_numbered(rows)])
    width = max(len(number) for number, _ in totals)
    return "\n".join([*table, *(f"{number:<{width}} {what}" for number, what in totals)])


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


def _mode(part: nn.Module) -> str:
    return "train" if part.training else "eval"


def _numbered(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(str(number), *row) for number, row in enumerate(rows)]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [map(str.ljust, row, widths) for row in rows]
    lines = [" | ".join(cells).rstrip() for cells in padded]
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:], rule]
