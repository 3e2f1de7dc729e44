"""What did `configure_optimizers` return? Optimizers, and for each scheduler when it steps."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from multigpu.errors import UserError, did_you_mean

FORMS = (
    "an optimizer, a list of optimizers, ([optimizers], [schedulers]), "
    '{"optimizer": …, "lr_scheduler": …, "monitor": …}, a list of such dicts, or None'
)


@dataclass
class Schedule:
    """When a scheduler steps: every `frequency` epochs or steps; a plateau's, by the metric `monitor`."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def parse(returned: Any, automatic: bool) -> tuple[list[Optimizer], list[Schedule]]:
    """Raises UserError for a form that is none of FORMS, and for several optimizers in automatic optimization."""
    optimizers, found = _parts(returned)
    if automatic and len(optimizers) > 1:
        raise UserError(
            f"configure_optimizers gives {len(optimizers)} optimizers: set self.automatic_optimization = False, and step them "
            f"yourself in training_step (a, b = self.optimizers())."
        )
    schedules = [_schedule(scheduler, monitor, automatic) for scheduler, monitor in found]
    for schedule in schedules:
        if getattr(schedule.scheduler, "optimizer", optimizers[0]) not in optimizers:
            raise UserError(
                "a scheduler changes an optimizer that configure_optimizers does not return."
            )
    return optimizers, schedules


def _parts(returned: Any) -> tuple[list[Optimizer], list[tuple[Any, str | None]]]:
    """The optimizers, and each scheduler (or its dict) with the metric that it watches."""
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict):
        returned = [returned]
    if isinstance(returned, (list, tuple)) and returned:
        if all(isinstance(part, Optimizer) for part in returned):
            return list(returned), []
        if all(
            isinstance(part, dict) and isinstance(part.get("optimizer"), Optimizer)
            for part in returned
        ):
            found = [
                (part["lr_scheduler"], part.get("monitor"))
                for part in returned
                if part.get("lr_scheduler")
            ]
            return [part["optimizer"] for part in returned], found
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            optimizers, schedulers = returned
            if all(isinstance(part, Optimizer) for part in optimizers):
                listed = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
                return list(optimizers), [(scheduler, None) for scheduler in listed]
    raise UserError(
        f"configure_optimizers returned {type(returned).__name__}: expected {FORMS}."
    )


def _schedule(scheduler: Any, monitor: str | None, automatic: bool) -> Schedule:
    told = dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}
    unknown = set(told) - {field.name for field in fields(Schedule)}
    if "scheduler" not in told:
        raise UserError(
            f"an lr_scheduler dict has the keys {sorted(told)}: expected 'scheduler', and perhaps 'interval', 'frequency', "
            f"'monitor', 'strict', 'name'."
        )
    for key in unknown:  # as Lightning, which people's code was written for
        hint = did_you_mean(key, (field.name for field in fields(Schedule))) or "leave it out."
        warnings.warn(
            f"an lr_scheduler dict has a key {key!r}, which means nothing here: {hint}",
            stacklevel=3,
        )
        del told[key]
    told.setdefault("monitor", monitor)
    told.setdefault("reduce_on_plateau", isinstance(told["scheduler"], ReduceLROnPlateau))
    schedule = Schedule(**told)
    if schedule.interval not in ("epoch", "step"):
        raise UserError(
            f"a scheduler's interval is {schedule.interval!r}: expected 'epoch' or 'step'."
        )
    if automatic and schedule.reduce_on_plateau and schedule.monitor is None:
        raise UserError(
            'ReduceLROnPlateau needs a metric: add "monitor": "val_loss" to what configure_optimizers returns.'
        )
    return schedule


def watched(trainer: Any, schedule: Schedule) -> Any:
    """The metric that a scheduler steps on; the mean over those ranks that have it, so that all keep one learning rate.

    None if nobody has logged it, and `strict` is False: then it does not step.
    """
    metric = trainer.callback_metrics.get(schedule.monitor)
    if trainer.world_size > 1:
        everybody = trainer.strategy.gather_objects(None if metric is None else float(metric))
        known = [value for value in everybody if value is not None]
        if known:  # what is equal already stays so to the last bit
            metric = torch.tensor(
                known[0] if len(set(known)) == 1 else sum(known) / len(known)
            )
    if metric is None and schedule.strict:
        names = ", ".join(trainer.callback_metrics) or "none"
        raise UserError(
            f"a scheduler watches {schedule.monitor!r}, which was not logged; there are: {names}."
        )
    return metric


class Stepper:
    """What `self.optimizers()` gives: the optimizer, whose `step` goes through the Trainer (scaling, hooks, counting)."""

    def __init__(self, optimizer: Optimizer, trainer: Any):
        self.optimizer, self._trainer = optimizer, trainer

    def step(self, closure: Any = None, **keywords: Any) -> None:
        self._trainer.run_step(self.optimizer, closure)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters learn in here; with sync_grad=False, no gradients are exchanged either."""
        trainer = self._trainer
        exchange = nullcontext() if sync_grad else trainer.strategy.no_sync(trainer.model)
        with exchange, trainer.lightning_module.toggled_optimizer(self.optimizer):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def wants_closure(optimizer: Optimizer) -> bool:
    """Does its `step` compute the loss itself, perhaps several times? LBFGS's, and any that cannot be called without."""
    closure = signature(optimizer.step).parameters.get("closure")
    return isinstance(optimizer, torch.optim.LBFGS) or (
        closure is not None and closure.default is closure.empty
    )
