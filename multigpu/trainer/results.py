"""Collects the values of `self.log` without waiting for the GPU, and reduces them over ranks.

Ranks can log different names, so they exchange names and values together, in one collective:
at an epoch's end, and after each step in which a value was logged with sync_dist. All ranks
must therefore log such values in the same steps, as in Lightning, else they wait for ever.
"""

import functools
import math
import numbers
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from multigpu.errors import UserError
from multigpu.nested import count_rows

if TYPE_CHECKING:
    from multigpu.trainer.log import LogContext

# How two totals are combined. A mean is a sum that is divided later.
REDUCTIONS = {"mean": torch.add, "sum": torch.add, "max": torch.maximum, "min": torch.minimum}
# DataParallel's replicas log from several threads. The lock is global because Results is
# pickled, and a lock cannot be pickled.
LOCK = threading.Lock()
# The hooks in which `self.log` is allowed, as in Lightning.
LOOPS = ("train", "validation", "test")
WITHIN_BATCH = frozenset(
    ["training_step", "validation_step", "test_step"]
    + [
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    ]
    + [f"on_{loop}_batch_{end}" for loop in LOOPS for end in ("start", "end")]
)
OUTSIDE_BATCH = frozenset(
    [f"on_{loop}_{when}" for loop in LOOPS for when in ("start", "epoch_start", "epoch_end")]
    + [f"{loop}_epoch_end" for loop in ("training", "validation", "test")]
)


class LogArguments(NamedTuple):
    """The arguments of LightningModule.log that say what becomes of the values."""

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Any = "mean"
    sync_dist: bool = False
    add_dataloader_idx: bool = True


@dataclass(frozen=True, slots=True)
class LogRule:
    """How a logged name is reduced over the ranks and reported."""

    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce: str
    sync: bool
    dataloader_idx: int | None  # None: one dataloader, or outside of its batches
    names_loader: bool  # whether the reported names end with dataloader_idx

    def reported_name(self, suffix: str = "") -> str:
        """The name; if it is logged by step and by epoch, with `suffix`."""
        loader = f"/dataloader_idx_{self.dataloader_idx}" if self.names_loader else ""
        return self.name + (suffix if self.on_step and self.on_epoch else "") + loader


@dataclass(slots=True)
class Entry:
    """A logged name on this rank: its last value, and its total in this epoch."""

    rule: LogRule
    arguments: LogArguments  # later calls must ask for the same
    value: Any = None
    total: Any = None
    weight: float = 0.0
    fresh: bool = False  # logged in this batch, and not yet among its step_metrics
    micro_batches: Any = None  # (sum, rows) over this batch's micro-batches that logged it


@dataclass
class Metrics:
    """Values by name, for each reader: callbacks, loggers, the progress bar.

    loaders   name for the loggers → the dataloader in whose batches it was logged
    """

    callback: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, Any] = field(default_factory=dict)
    loaders: dict[str, int | None] = field(default_factory=dict)

    def update(self, other: "Metrics") -> None:
        """Add the other's values; they replace values of the same name."""
        for name, values in vars(self).items():
            values.update(getattr(other, name))


def report(pairs: Iterable[tuple[LogRule, Any]], on_step: bool, training: bool) -> Metrics:
    """The values, under the names of a step's or of an epoch's values."""
    metrics = Metrics()
    for rule, value in pairs:
        name = rule.reported_name("_step" if on_step else "_epoch")
        if rule.logger:
            metrics.logged[name] = value
            metrics.loaders[name] = rule.dataloader_idx
        if rule.prog_bar:
            metrics.progress_bar[name] = value
        if training or not on_step:
            metrics.callback[rule.reported_name()] = value
            metrics.callback[name] = value
    return metrics


class Results:
    """The logged values of one loop (training, validation, test).

    gather      collects one object per rank: Strategy.gather_objects
    device      the device on which values are added up if replicas or micro-batches log parts
                of a batch; else None
    last        each name's newest step value in this epoch, as reported; the loggers get all
                of them, also those that were not logged in the last batch
    """

    def __init__(self, gather: Callable[[Any], list], ranks: int, training: bool):
        self.gather = gather
        self.ranks = ranks
        self.training = training
        self.device: torch.device | None = None
        self.entries: dict[tuple, Entry] = {}
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.last: dict[tuple, tuple[LogRule, Any]] = {}

    def start_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        self.batch = batch
        self.batch_size = None
        if self.dataloader_idx != dataloader_idx:
            self.dataloader_idx = dataloader_idx
            self.last.clear()

    def log(
        self,
        context: "LogContext",
        name: str,
        value: Any,
        arguments: LogArguments,
        batch_size: int | None = None,
    ) -> None:
        """Record a value for LightningModule.log.

        Raises UserError if the value is not one number, if the reduction is unknown, or if
        values are not collected in this hook.
        """
        hook, micro_batch = context.hook, context.micro_batch
        key = (hook, name, self.dataloader_idx if arguments.add_dataloader_idx else None)
        with LOCK:
            entry = self.entries.get(key)
            if entry is None:
                entry = self._add(key, arguments)
            elif entry.arguments != arguments:
                raise UserError(
                    f"self.log({name!r}) was called with other arguments earlier in {hook}: "
                    f"give the value another name."
                )
            elif entry.rule.dataloader_idx != self.dataloader_idx:
                raise UserError(
                    f"self.log({name!r}, add_dataloader_idx=False) was called for two "
                    f"dataloaders: give each its own name, or leave add_dataloader_idx out."
                )
            rule = entry.rule
            logged_before = entry.fresh
            entry.fresh = True
            if hasattr(value, "compute"):
                # A torchmetrics.Metric itself reduces over the ranks.
                entry.value = value
                return
            value = _one_number(name, value)
            entry.value = value
            rows = context.batch_size if batch_size is None else batch_size
            if self.device is not None:
                value = value.to(self.device)
                rows = self._rows(rule, hook, micro_batch) if rows is None else rows
                total, before = entry.micro_batches if logged_before else (0.0, 0)
                entry.micro_batches = (total + value * rows, before + rows)
                entry.value = value
                if rule.reduce == "mean":
                    entry.value = entry.micro_batches[0] / max(1, entry.micro_batches[1])
            if not rule.on_epoch:
                return
            if rule.reduce == "mean":
                weight = self._rows(rule, hook, micro_batch) if rows is None else rows
                value = value * weight
                entry.weight = entry.weight + weight
            if entry.total is None:
                entry.total = value
            else:
                entry.total = REDUCTIONS[rule.reduce](entry.total, value)

    def _add(self, key: tuple, arguments: LogArguments) -> Entry:
        hook, name, _ = key
        check_hook_logs(hook, name)
        by_step = self.training and hook not in OUTSIDE_BATCH
        reduce = getattr(arguments.reduce_fx, "__name__", str(arguments.reduce_fx)).lower()
        rule = LogRule(
            name,
            prog_bar=arguments.prog_bar,
            logger=arguments.logger is not False,
            on_step=by_step if arguments.on_step is None else arguments.on_step,
            on_epoch=not by_step if arguments.on_epoch is None else arguments.on_epoch,
            reduce=reduce.replace("avg", "mean"),
            sync=arguments.sync_dist,
            dataloader_idx=self.dataloader_idx,
            names_loader=arguments.add_dataloader_idx and self.dataloader_idx is not None,
        )
        if rule.reduce not in REDUCTIONS:
            raise UserError(
                f"self.log({name!r}, reduce_fx={arguments.reduce_fx!r}): expected one of "
                f"{', '.join(REDUCTIONS)}."
            )
        if rule.on_step and hook in OUTSIDE_BATCH:
            raise UserError(
                f"self.log({name!r}, on_step=True) in {hook}: no step runs there; leave "
                f"on_step out."
            )
        entry = self.entries[key] = Entry(rule, arguments)
        return entry

    def _rows(self, rule: LogRule, hook: str, micro_batch: Any) -> int:
        """The number of rows that the step computes on; 1 outside of a batch.

        Raises UserError if an epoch's mean needs this number and the batch has no tensor.
        """
        if self.batch is None or hook in OUTSIDE_BATCH:
            return 1
        if self.device is not None:
            # training_step_end has no micro-batch: it gets the outputs of all
            # micro-batches.
            rows = count_rows(self.batch if micro_batch is None else micro_batch)
        else:
            if self.batch_size is None:
                self.batch_size = count_rows(self.batch)
            rows = self.batch_size
        if rows is None and rule.on_epoch and rule.reduce == "mean":
            raise UserError(
                f"self.log({rule.name!r}): the batch has no tensor, so its batch size is "
                f"unknown, which the epoch's mean needs: give batch_size=."
            )
        return 1 if rows is None else rows

    def step_metrics(self, exchange: bool) -> Metrics:
        """Return the step values that were logged in this batch since the last call.

        exchange   reduce sync_dist values over the ranks
        """
        logged: dict[tuple, tuple[LogRule, Any]] = {}
        for key, entry in self.entries.items():
            if entry.fresh:
                entry.fresh = False
                value = _value_of_batch(entry.value)
                if entry.rule.on_step and value is not None:
                    logged[key] = (entry.rule, value)
        local = {k: (rule, float(value)) for k, (rule, value) in logged.items() if rule.sync}
        if local and exchange and self.ranks > 1:
            for key, of_ranks in _by_key(self.gather(local)).items():
                rule, _ = of_ranks[0]
                total = _combine(rule, [value for _, value in of_ranks])
                mean = rule.reduce == "mean"
                logged[key] = (rule, torch.tensor(total / len(of_ranks) if mean else total))
        self.last.update(logged)
        return report(logged.values(), on_step=True, training=self.training)

    def last_step_metrics(self) -> Metrics:
        """Return each name's last reported step value, as old as the epoch's first batch."""
        return report(self.last.values(), on_step=True, training=self.training)

    def epoch_metrics(self) -> Metrics:
        """Return the epoch's values over all batches and ranks.

        All ranks must call it, even a rank that has logged nothing.
        """
        totals: dict[tuple, tuple] = {}
        for key, entry in self.entries.items():
            rule = entry.rule
            if rule.on_epoch and hasattr(entry.value, "compute"):
                totals[key] = (rule, _one_number(rule.name, entry.value.compute()), None)
            elif rule.on_epoch and entry.total is not None:
                totals[key] = (rule, entry.total, entry.weight)
        if self.ranks > 1:
            local = {key: (rule, float(total), w) for key, (rule, total, w) in totals.items()}
            of_ranks = _by_key(self.gather(local))
        else:
            of_ranks = _by_key([totals])
        pairs = map(_over_ranks, of_ranks.values())
        return report(pairs, on_step=False, training=self.training)

    def reset(self) -> None:
        """Delete all values, before a new epoch."""
        for entry in self.entries.values():
            if hasattr(entry.value, "reset"):
                entry.value.reset()
        self.entries.clear()
        self.last.clear()
        self.batch = None


def _one_number(name: str, value: Any) -> torch.Tensor:
    """Return the value as a tensor of shape (). Raises UserError if it is not one number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().reshape(())
        if value.dtype in (torch.float32, torch.float64):
            return value.clone()  # the user can change it in place later
        return value.float()
    if isinstance(value, numbers.Real):  # also NumPy's
        return torch.tensor(float(value))
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind = f"a tensor of shape {tuple(value.shape)}"
    raise UserError(f"self.log({name!r}) was given {kind}: expected one number.")


def _value_of_batch(value: Any) -> Any:
    """Return the value; a torchmetrics.Metric gives this batch's, or None after `update`."""
    return value._forward_cache if hasattr(value, "compute") else value


def _by_key(of_ranks: list[dict[tuple, tuple]]) -> dict[tuple, list[tuple]]:
    """What the ranks logged under each key, with the same order of keys on all ranks."""
    keys = dict.fromkeys(key for logged in of_ranks for key in logged)
    return {key: [logged[key] for logged in of_ranks if key in logged] for key in keys}


def _combine(rule: LogRule, totals: list[float]) -> float:
    """Combine the ranks' totals, in float64. One NaN makes the result NaN."""
    tensors = [torch.tensor(total, dtype=torch.float64) for total in totals]
    return functools.reduce(REDUCTIONS[rule.reduce], tensors).item()


def _over_ranks(
    of_ranks: list[tuple[LogRule, Any, float | None]],
) -> tuple[LogRule, torch.Tensor]:
    """The epoch's value of the ranks' (rule, total, weight); a mean of nothing is NaN.

    The weight of a torchmetrics.Metric is None: it has reduced over the ranks itself.
    """
    rule, total, weight = of_ranks[0]
    if len(of_ranks) > 1 and weight is not None:
        total = _combine(rule, [total for _, total, _ in of_ranks])
        weight = sum(weight for _, _, weight in of_ranks)
    if rule.reduce == "mean" and weight is not None:
        total = total / weight if weight else math.nan
    return rule, torch.as_tensor(total)


def check_hook_logs(hook: str, name: str) -> None:
    """Raises UserError if values that are logged in `hook` would be lost.

    hook   the hook that runs; "" outside of a loop's hooks
    """
    if hook not in WITHIN_BATCH and hook not in OUTSIDE_BATCH:
        where = f"in {hook}" if hook else "outside of the steps and their hooks"
        raise UserError(
            f"self.log({name!r}) {where}: values are not collected there. Log in a step or at "
            f"an epoch's end, or give the number to self.logger.log_metrics."
        )
