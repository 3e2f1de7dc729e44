"""LearningRateMonitor: log the learning rate of each optimizer."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

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
        # An optimizer without a scheduler has no interval, so it is logged at both.
        rates = {
            name: rate
            for name, rate, own_interval in _rates(trainer)
            if self.logging_interval or own_interval in (None, interval)
        }
        if not rates:
            return
        trainer.callback_metrics.update({name: torch.tensor(rates[name]) for name in rates})
        for logger in trainer.loggers:
            logger.log_metrics(metrics=rates, step=trainer._logged_step)


def _rates(trainer: Any) -> Iterator[tuple[str, float, str | None]]:
    """Each parameter group's name, its learning rate and its scheduler's interval.

    Optimizers with a scheduler come first, once for each scheduler.
    """
    rows = [(config.scheduler.optimizer, config) for config in trainer.lr_scheduler_configs]
    scheduled = {id(optimizer) for optimizer, _ in rows}
    rows += [
        (optimizer, None) for optimizer in trainer.optimizers if id(optimizer) not in scheduled
    ]
    count: Counter[type] = Counter()
    for optimizer, config in rows:
        kind = type(optimizer)
        name = config.name if config else None
        if name is None:
            number = f"-{count[kind]}" if count[kind] else ""
            name = f"lr-{kind.__name__}{number}"
            count[kind] += 1
        interval = config.interval if config else None
        groups = optimizer.param_groups
        for n, group in enumerate(groups, start=1):
            part = "/" + group.get("name", f"pg{n}") if len(groups) > 1 else ""
            yield name + part, float(group["lr"]), interval
