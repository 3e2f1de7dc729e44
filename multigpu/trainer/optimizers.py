"""Reads the optimizers and learning-rate schedulers that `configure_optimizers` returned."""

import warnings
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from multigpu.errors import UserError

if TYPE_CHECKING:
    from multigpu.trainer.run import Run

FORMS = (
    "an optimizer, a list of optimizers, ([optimizers], [schedulers]), "
    '{"optimizer": …, "lr_scheduler": …, "monitor": …}, a list of such dicts, or None'
)


@dataclass
class LRSchedulerConfig:
    """A scheduler, and when it steps: every `frequency` epochs or steps.

    ReduceLROnPlateau steps on the metric `monitor`.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


def parse(returned: Any, automatic: bool) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return the optimizers and the configs of the schedulers.

    Raises UserError if `returned` has none of FORMS; in automatic optimization, also if it has
    several optimizers.
    """
    optimizers, schedulers = _split(returned)
    if automatic and len(optimizers) > 1:
        raise UserError(
            f"configure_optimizers returns {len(optimizers)} optimizers: set "
            f"self.automatic_optimization = False, and step them yourself in training_step "
            f"(a, b = self.optimizers())."
        )
    return optimizers, [
        _config(scheduler, monitor, automatic) for scheduler, monitor in schedulers
    ]


def _split(returned: Any) -> tuple[list[Optimizer], list[tuple[Any, str | None]]]:
    """The optimizers, and each scheduler (or its dict) with the metric that it monitors."""
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict):
        returned = [returned]
    if isinstance(returned, (list, tuple)) and returned:
        if all(isinstance(item, Optimizer) for item in returned):
            return list(returned), []
        if all(
            isinstance(item, dict) and isinstance(item.get("optimizer"), Optimizer)
            for item in returned
        ):
            schedulers = [
                (item["lr_scheduler"], item.get("monitor"))
                for item in returned
                if item.get("lr_scheduler") is not None
            ]
            return [item["optimizer"] for item in returned], schedulers
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            optimizers, schedulers = returned
            if all(isinstance(item, Optimizer) for item in optimizers):
                if not isinstance(schedulers, (list, tuple)):
                    schedulers = [schedulers]
                return list(optimizers), [(scheduler, None) for scheduler in schedulers]
    raise UserError(
        f"configure_optimizers returned {type(returned).__name__}: expected {FORMS}."
    )


def _config(scheduler: Any, monitor: str | None, automatic: bool) -> LRSchedulerConfig:
    settings = dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}
    known = [field.name for field in fields(LRSchedulerConfig)]
    if "scheduler" not in settings:
        raise UserError(
            f"an lr_scheduler dict has the keys {sorted(settings)}: expected 'scheduler', too."
        )
    for key in set(settings) - set(known):  # Lightning warns, too
        warnings.warn(
            f"an lr_scheduler dict has the key {key!r}, which has no effect: the keys are "
            f"{', '.join(known)}.",
            stacklevel=3,
        )
        del settings[key]
    settings.setdefault("monitor", monitor)
    is_plateau = isinstance(settings["scheduler"], ReduceLROnPlateau)
    settings.setdefault("reduce_on_plateau", is_plateau)
    config = LRSchedulerConfig(**settings)
    if config.interval not in ("epoch", "step"):
        raise UserError(
            f"a scheduler's interval is {config.interval!r}: expected 'epoch' or 'step'."
        )
    if automatic and config.reduce_on_plateau and config.monitor is None:
        raise UserError(
            'ReduceLROnPlateau needs a metric: add "monitor": "val_loss" to what '
            "configure_optimizers returns."
        )
    return config


def monitored_metric(run: "Run", config: LRSchedulerConfig) -> Any:
    """Return the metric that a scheduler steps on: the mean over the ranks that logged it.

    The mean keeps the learning rate equal on all ranks. Returns None if no rank has logged the
    metric and `strict` is False; the scheduler then does not step.
    """
    metrics = run.state.metrics.callback
    metric = metrics.get(config.monitor)
    if run.strategy.world.size > 1:
        of_ranks = run.strategy.gather_objects(None if metric is None else float(metric))
        known = [value for value in of_ranks if value is not None]
        if known:
            # Equal values are not averaged: the sum would change their last bits.
            mean = known[0] if len(set(known)) == 1 else sum(known) / len(known)
            metric = torch.tensor(mean)
    if metric is None and config.strict:
        names = ", ".join(metrics) or "none"
        raise UserError(
            f"a scheduler monitors {config.monitor!r}, which was not logged; logged metrics: "
            f"{names}."
        )
    if metric is None:
        run.state.warn_once(
            f"a scheduler monitors {config.monitor!r}, which was not logged, and strict is "
            f"False: it does not step until the metric is logged."
        )
    return metric
