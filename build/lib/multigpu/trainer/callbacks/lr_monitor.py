"""LearningRateMonitor: log the learning rate, the momentum and the weight decay."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from multigpu.errors import UserError
from multigpu.trainer.callbacks.callback import Callback

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log each optimizer's learning rate.

    Its name is "lr-SGD" or, with several parameter groups, "lr-SGD/pg1", "lr-SGD/pg2", ….

    `logging_interval` is "step", "epoch", or None for each scheduler's own interval.
    `log_momentum` adds "lr-SGD-momentum" (Adam's first beta), `log_weight_decay` adds
    "lr-SGD-weight_decay". `lrs` contains the logged values: one list per name.

    Raises UserError if the Trainer has no logger, or if two parameter groups have the same
    name.
    """

    def __init__(
        self,
        logging_interval: str | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ):
        if logging_interval not in (None, "step", "epoch"):
            raise UserError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): "
                "expected 'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.loggers:
            raise UserError(
                "LearningRateMonitor needs a logger: "
                "remove logger=False from the Trainer's arguments."
            )
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        if self.log_momentum and not all({"momentum", "betas"} & set(g) for g in groups):
            warnings.warn(
                "LearningRateMonitor(log_momentum=True), but some optimizers do not have "
                "momentum. It is logged as 0.",
                RuntimeWarning,
                stacklevel=2,
            )
        names = [name for _, group_names, _ in _named(trainer) for name in group_names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps
        due = every and ((trainer._logged_step + 1) % every == 0 or trainer.should_stop)
        if due and self.logging_interval != "epoch":
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: Trainer, interval: str) -> None:
        values: dict[str, float] = {}
        for optimizer, names, own_interval in _named(trainer):
            # An optimizer without a scheduler has no interval, so it is logged at both.
            if self.logging_interval is not None or own_interval in (None, interval):
                values |= self._values(optimizer, names)
        if not values:
            return
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in values.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(metrics=values, step=trainer._logged_step)

    def _values(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        """The values to log, by name. `names` are the names of the parameter groups."""
        values: dict[str, float] = {}
        for group, name in zip(optimizer.param_groups, names, strict=True):
            # When a group is added during training, the first group's name gets "/pg1".
            if name not in self.lrs and name.endswith("/pg1"):
                self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), [])
            values[name] = float(group["lr"])
            self.lrs.setdefault(name, []).append(values[name])
            if self.log_momentum:
                key = f"{name}-momentum"
                values[key] = _momentum(group)
                self.last_momentum_values[key] = values[key]
            if self.log_weight_decay:
                key = f"{name}-weight_decay"
                values[key] = group.get("weight_decay", 0)
                self.last_weight_decay_values[key] = values[key]
        return values


def _momentum(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group.get("momentum", 0)


def _named(trainer: Trainer) -> list[tuple[Optimizer, list[str], str | None]]:
    """Each optimizer, its groups' names and its scheduler's interval.

    Optimizers with a scheduler come first.
    """
    optimizers = [
        (config.scheduler.optimizer, config.name, config.interval)
        for config in trainer.lr_scheduler_configs
    ]
    scheduled = {id(optimizer) for optimizer, _, _ in optimizers}
    for optimizer in trainer.optimizers:
        if id(optimizer) not in scheduled:
            optimizers.append((optimizer, None, None))
    named = []
    count: Counter[type] = Counter()
    for optimizer, given_name, interval in optimizers:
        kind = type(optimizer)
        if given_name is None:
            count[kind] += 1
        name = given_name or f"lr-{kind.__name__}"
        if count[kind] > 1:
            name = f"{name}-{count[kind] - 1}"
        named.append((optimizer, _group_names(name, optimizer.param_groups), interval))
    return named


def _group_names(name: str, groups: list[dict[str, Any]]) -> list[str]:
    if len(groups) == 1:
        group_name = groups[0].get("name")
        return [f"{name}/{group_name}" if group_name else name]
    names = [group.get("name", f"pg{i}") for i, group in enumerate(groups, start=1)]
    if duplicates := sorted({each for each in names if names.count(each) > 1}):
        raise UserError(
            f"LearningRateMonitor: {name} has several parameter groups named "
            f"{', '.join(duplicates)}: rename them."
        )
    return [f"{name}/{each}" for each in names]
