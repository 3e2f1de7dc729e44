"""LearningRateMonitor: log the learning rate of each optimizer."""

from collections import Counter
from typing import Any

import torch
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback
from multigpu.trainer.refused import refuse_arguments


class LearningRateMonitor(Callback):
    """Log each optimizer's learning rate.

    Its name is "lr-SGD" or, with several parameter groups, "lr-SGD/pg1", "lr-SGD/pg2", …,
    or the groups' own names.

    `logging_interval` is "step", "epoch", or None for each scheduler's own interval.

    Raises UserError if the Trainer has no logger.
    """

    def __init__(self, logging_interval: str | None = None, **refused: Any):
        refuse_arguments("LearningRateMonitor", refused)
        if logging_interval not in (None, "step", "epoch"):
            raise UserError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): "
                "expected 'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval

    def on_train_start(self, trainer, pl_module):
        if not trainer.loggers:
            raise UserError(
                "LearningRateMonitor needs a logger: "
                "remove logger=False from the Trainer's arguments."
            )

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        every = trainer.log_every_n_steps
        due = every and ((trainer._logged_step + 1) % every == 0 or trainer.should_stop)
        if due and self.logging_interval != "epoch":
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer, pl_module):
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: Any, interval: str) -> None:
        rates: dict[str, float] = {}
        for optimizer, names, own_interval in _named(trainer):
            # An optimizer without a scheduler has no interval, so it is logged at both.
            if self.logging_interval is None and own_interval not in (None, interval):
                continue
            for group, name in zip(optimizer.param_groups, names, strict=True):
                rates[name] = float(group["lr"])
        if not rates:
            return
        trainer.callback_metrics.update({name: torch.tensor(rates[name]) for name in rates})
        for logger in trainer.loggers:
            logger.log_metrics(metrics=rates, step=trainer._logged_step)


def _named(trainer: Any) -> list[tuple[Optimizer, list[str], str | None]]:
    """Each optimizer, its groups' names and its scheduler's interval.

    Optimizers with a scheduler come first; each scheduler has a row.
    """
    rows = [(config.scheduler.optimizer, config) for config in trainer.lr_scheduler_configs]
    scheduled = {id(optimizer) for optimizer, _ in rows}
    rows += [
        (optimizer, None) for optimizer in trainer.optimizers if id(optimizer) not in scheduled
    ]
    named = []
    count: Counter[type] = Counter()
    for optimizer, config in rows:
        kind = type(optimizer)
        name = config.name if config else None
        if name is None:
            number = f"-{count[kind]}" if count[kind] else ""
            name = f"lr-{kind.__name__}{number}"
            count[kind] += 1
        groups = optimizer.param_groups
        names = [name]
        if len(groups) > 1:
            group_names = (
                group.get("name", f"pg{n}") for n, group in enumerate(groups, start=1)
            )
            names = [f"{name}/{group_name}" for group_name in group_names]
        named.append((optimizer, names, config.interval if config else None))
    return named
