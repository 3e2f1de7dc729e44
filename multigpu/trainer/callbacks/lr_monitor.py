"""How did the learning rate go? LearningRateMonitor writes it, and the momentum, into the logs."""

from collections import Counter
from typing import Any

import torch
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback


class LearningRateMonitor(Callback):
    """Log every optimizer's learning rate, as "lr-SGD", or "lr-SGD/pg1" where it has several parameter groups.

    `logging_interval` is "step", "epoch", or None for what each scheduler has. `log_momentum` adds "lr-SGD-momentum"
    (Adam's first beta), `log_weight_decay` adds "lr-SGD-weight_decay". `lrs` keeps what was logged, a list a name.
    Raises UserError where the Trainer has no logger, or two parameter groups have one name.
    """

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ):
        if logging_interval not in (None, "step", "epoch"):
            raise UserError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): 'step', 'epoch' or None."
            )
        self.logging_interval, self.log_momentum, self.log_weight_decay = (
            logging_interval,
            log_momentum,
            log_weight_decay,
        )
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.loggers:
            raise UserError(
                "LearningRateMonitor needs a logger: take logger=False out of the Trainer's arguments."
            )
        names = [name for _, groups, _ in _named(trainer) for name in groups]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps
        due = every and ((trainer._logged_step + 1) % every == 0 or trainer.should_stop)
        if due and self.logging_interval != "epoch":
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: Any, interval: str) -> None:
        values: dict[str, float] = {}
        for optimizer, names, own_interval in _named(trainer):
            # An optimizer without a scheduler has no interval of its own: it is logged at both.
            if self.logging_interval is not None or own_interval in (None, interval):
                values |= self._values(optimizer, names)
        if values:
            trainer.callback_metrics.update(
                {name: torch.tensor(value) for name, value in values.items()}
            )
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer._logged_step)

    def _values(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        values = {}
        for group, name in zip(optimizer.param_groups, names, strict=True):
            values[name] = float(group["lr"])
            if name not in self.lrs and name.endswith(
                "/pg1"
            ):  # the optimizer got a second group
                self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), [])
            self.lrs.setdefault(name, []).append(values[name])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                values[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = (
                    momentum
                )
            if self.log_weight_decay:
                decay = group.get("weight_decay", 0)
                values[f"{name}-weight_decay"] = self.last_weight_decay_values[
                    f"{name}-weight_decay"
                ] = decay
        return values


def _named(trainer: Any) -> list[tuple[Optimizer, list[str], str | None]]:
    """Every optimizer, its groups' names, and its scheduler's interval; those with a scheduler come first."""
    found, seen = [], Counter()
    with_one = [
        (c.scheduler.optimizer, c.name, c.interval) for c in trainer.lr_scheduler_configs
    ]
    scheduled = {id(optimizer) for optimizer, _, _ in with_one}
    without = [
        (optimizer, None, None)
        for optimizer in trainer.optimizers
        if id(optimizer) not in scheduled
    ]
    for optimizer, given, interval in with_one + without:
        seen[type(optimizer)] += given is None
        name, count = given or f"lr-{type(optimizer).__name__}", seen[type(optimizer)]
        name = f"{name}-{count - 1}" if count > 1 else name
        found.append((optimizer, _group_names(name, optimizer.param_groups), interval))
    return found


def _group_names(name: str, groups: list[dict[str, Any]]) -> list[str]:
    if len(groups) == 1:
        return [f"{name}/{groups[0]['name']}" if groups[0].get("name") else name]
    names = [group.get("name", f"pg{i}") for i, group in enumerate(groups, start=1)]
    if twice := sorted({which for which in names if names.count(which) > 1}):
        raise UserError(
            f"LearningRateMonitor: {name} has several parameter groups named {', '.join(twice)}: rename them."
        )
    return [f"{name}/{which}" for which in names]
