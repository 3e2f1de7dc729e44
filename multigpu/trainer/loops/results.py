"""What becomes of `self.log`? Numbers are kept without waiting for the GPU, and reduced over batches and ranks once.

Ranks may log different things: they exchange names and numbers together, in one collective that every rank takes part in
at the same places, so nothing can hang: the end of an epoch, and the steps that are logged. Once a rank has logged a step's
value with sync_dist, each step is such a place: a callback may look at any. The ranks hear of it in the all-reduce that ends
every batch, and a run's first batch is always such a place. Only a name that is first logged later, in a step that is not
logged, is the rank's own in that one step.
"""

import functools
import math
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from multigpu.errors import UserError
from multigpu.nested import rows_of
from multigpu.trainer.loops.log_rules import (
    BETWEEN,
    refuse_where_nothing_collects,
    warn_of_lonely_names,
)

# How two totals become one. A mean is a sum that is divided later.
REDUCTIONS = {"mean": torch.add, "sum": torch.add, "max": torch.maximum, "min": torch.minimum}
LOCK = threading.Lock()  # dp's replicas log at the same time
PIECE = threading.local()  # the piece of the batch that this thread computes on: dp's replica's, pipeline's micro-batch


@dataclass(slots=True)
class Entry:
    """One logged name: how it is told, its last value, and what has come together in this epoch."""

    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce: str
    sync: bool
    everywhere: bool  # False: rank_zero_only
    loader: int | None
    value: Any = None
    total: Any = None
    weight: float = 0.0
    fresh: bool = False  # logged in this batch
    told: bool = False  # in step_metrics or epoch_metrics, since it was logged
    given: tuple = ()  # self.log's arguments
    pieces: Any = None  # (sum, rows) of the pieces of this batch that have logged it

    def named(self, on_step: bool) -> str:
        """Logged by step and by epoch, a name has two forms."""
        suffix = ("_step" if on_step else "_epoch") if self.on_step and self.on_epoch else ""
        where = "" if self.loader is None else f"/dataloader_idx_{self.loader}"
        return self.name + suffix + where

    def plain(self) -> str:
        return self.name + ("" if self.loader is None else f"/dataloader_idx_{self.loader}")


class Results:
    """The logged numbers of one loop (training, validation, test).

    gather   collects one object of each rank: Strategy.gather_objects
    """

    def __init__(self, gather: Callable[[Any], list], ranks: int, training: bool):
        self.gather, self.ranks, self.training = gather, ranks, training
        self.entries: dict[tuple, Entry] = {}
        self.hook = ""  # which of the user's hooks is running
        self.batch: Any = None
        self.batch_size: int | None = None
        self.loader: int | None = None
        self.home: torch.device | None = None
        self.any_fresh = False
        self.sync_asked = False  # has this rank ever logged a step's value with sync_dist?

    @contextmanager
    def within(self, hook: str) -> Iterator[None]:
        """For hooks that are not called through hooking.at: `log` must know where it was called."""
        before, self.hook = self.hook, hook
        try:
            yield
        finally:
            self.hook = before

    def start_batch(self, batch: Any, loader: int | None = None) -> None:
        self.batch, self.batch_size, self.loader = batch, None, loader
        if self.any_fresh:
            self.any_fresh = False
            for entry in self.entries.values():
                entry.fresh = False

    def log(
        self, name: str, value: Any, prog_bar: bool, logger: bool | None, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: Any, sync: bool, add_loader: bool, batch_size: int | None, rank_zero_only: bool,
    ) -> None:  # fmt: skip
        """What LightningModule.log calls. Raises UserError for a value that is not one number, or an unknown reduction."""
        key = (self.hook, name, self.loader if add_loader else None)
        with LOCK:
            entry, given = (
                self.entries.get(key),
                (prog_bar, logger, on_step, on_epoch, reduce_fx, sync, rank_zero_only),
            )
            if entry is None:
                entry = self._new(key, given)
            elif entry.given != given:
                raise UserError(
                    f"self.log({name!r}) has other arguments in {self.hook} than before: give it another name."
                )
            again, entry.fresh, entry.told, self.any_fresh = entry.fresh, True, False, True
            if hasattr(value, "compute"):  # a torchmetrics.Metric, which gathers for itself
                entry.value = value
                return
            value = _number(name, value)
            entry.value = value
            if self.home is not None:  # from a replica on another device, or of a micro-batch
                value, rows = (
                    value.to(self.home),
                    self._rows(entry) if batch_size is None else batch_size,
                )
                total, before = entry.pieces if again else (0.0, 0)
                entry.pieces = total + value * rows, before + rows
                entry.value = (
                    entry.pieces[0] / max(1, entry.pieces[1])
                    if entry.reduce == "mean"
                    else value
                )
            if not entry.on_epoch:
                return
            if entry.reduce == "mean":
                weight = self._rows(entry) if batch_size is None else batch_size
                value, entry.weight = value * weight, entry.weight + weight
            entry.total = (
                value if entry.total is None else REDUCTIONS[entry.reduce](entry.total, value)
            )

    def _new(self, key: tuple, given: tuple) -> Entry:
        (
            (hook, name, loader),
            (prog_bar, logger, on_step, on_epoch, reduce_fx, sync, rank_zero_only),
        ) = key, given
        refuse_where_nothing_collects(hook, name)
        within = self.training and hook not in BETWEEN
        on_step, on_epoch = (
            within if on_step is None else on_step,
            (not within) if on_epoch is None else on_epoch,
        )
        reduce = getattr(reduce_fx, "__name__", str(reduce_fx)).lower().replace("avg", "mean")
        if reduce not in REDUCTIONS:
            raise UserError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): expected one of {', '.join(REDUCTIONS)}."
            )
        if not on_step and not on_epoch:
            raise UserError(
                f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing: set one of them."
            )
        if on_step and hook in BETWEEN:
            raise UserError(
                f"self.log({name!r}, on_step=True) in {hook}: there is no step, so leave on_step out."
            )
        entry = Entry(
            name,
            prog_bar,
            logger is not False,
            on_step,
            on_epoch,
            reduce,
            sync,
            not rank_zero_only,
            loader,
        )
        self.entries[key], entry.given = entry, given
        self.sync_asked |= on_step and sync and not rank_zero_only
        return entry

    def _rows(self, entry: Entry) -> int:
        """The rows of what is computed on. Raises UserError if a mean by epoch needs them and the batch does not tell."""
        if self.batch is None or self.hook in BETWEEN:
            return 1
        if self.home is not None:
            piece = getattr(
                PIECE, "batch", None
            )  # none in training_step_end, where the pieces are joined
            found = rows_of(self.batch if piece is None else piece)
        else:
            found = self.batch_size = (
                rows_of(self.batch) if self.batch_size is None else self.batch_size
            )
        if found is None and entry.on_epoch and entry.reduce == "mean":
            raise UserError(
                f"self.log({entry.name!r}): the batch has no tensor that tells how many rows the epoch's mean should count: "
                f"give batch_size=."
            )
        return 1 if found is None else found

    def step_metrics(self, exchange: bool) -> "Told":
        """The values of this batch. With `exchange`, which all ranks must say alike, those with sync_dist over all ranks."""
        fresh = {
            key: entry for key, entry in self.entries.items() if entry.on_step and entry.fresh
        }
        values = {key: _computed(entry.value) for key, entry in fresh.items()}
        fresh = {key: entry for key, entry in fresh.items() if values[key] is not None}
        for entry in fresh.values():
            entry.told = True
        if exchange and self.ranks > 1:
            told = self.gather(
                {
                    key: (_settings(e), float(values[key]))
                    for key, e in fresh.items()
                    if e.sync and e.everywhere
                }
            )
            warn_of_lonely_names(told)
            for key in dict.fromkeys(key for theirs in told for key in theirs):
                parts = [theirs[key] for theirs in told if key in theirs]
                reduce = fresh.setdefault(key, Entry(*parts[0][0])).reduce
                total = _over_ranks(reduce, (value for _, value in parts))
                values[key] = (total / (len(parts) if reduce == "mean" else 1)).float()
        return Told(
            [(entry, values[key]) for key, entry in fresh.items()],
            on_step=True,
            training=self.training,
        )

    def epoch_metrics(self) -> "Told":
        """The epoch's values over all batches and all ranks; all ranks call it, whatever they have logged."""
        mine: dict[tuple, tuple] = {}
        for key, entry in self.entries.items():
            if not entry.on_epoch:
                continue
            entry.told = True
            if hasattr(entry.value, "compute"):
                entry.total, entry.weight = entry.value.compute(), 1.0
                mine[key] = (entry, entry.total, None)
            elif entry.total is not None:
                mine[key] = (entry, entry.total, entry.weight)
        found = []
        if self.ranks == 1:
            for entry, total, weight in mine.values():
                found.append((entry, torch.as_tensor(_divided(entry, total, weight))))
        else:
            sent = {
                key: (_settings(e), float(total), weight)
                for key, (e, total, weight) in mine.items()
            }
            told = self.gather(sent)
            for key in dict.fromkeys(key for theirs in told for key in theirs):
                settings, total, weight = next(theirs[key] for theirs in told if key in theirs)
                entry = Entry(*settings)
                if weight is not None and entry.everywhere:
                    _, totals, weights = zip(
                        *(theirs[key] for theirs in told if key in theirs), strict=True
                    )
                    total, weight = _over_ranks(entry.reduce, totals), sum(weights)
                found.append((entry, torch.as_tensor(_divided(entry, total, weight)).float()))
        return Told(found, on_step=False, training=self.training)

    def untold(self) -> dict[str, Any]:
        """What was logged since the last telling, as this rank knows it: for a hook that looks at what it has just logged."""
        on_step, found = self.hook not in BETWEEN, []
        for entry in self.entries.values():
            if not entry.told and entry.on_step and on_step:
                found.append((entry, _computed(entry.value)))
            elif not entry.told and entry.on_epoch and not on_step and entry.total is not None:
                found.append(
                    (entry, torch.as_tensor(_divided(entry, entry.total, entry.weight)))
                )
        return Told(
            [pair for pair in found if pair[1] is not None], on_step, self.training
        ).callback

    def reset(self) -> None:
        """A new epoch."""
        for entry in self.entries.values():
            if hasattr(entry.value, "reset"):
                entry.value.reset()
        self.entries.clear()
        self.any_fresh, self.batch = False, None


class Told:
    """Values by who wants them: the loggers, the callbacks, the progress bar. All by name."""

    def __init__(self, found: list[tuple[Entry, Any]], on_step: bool, training: bool):
        self.log = {e.named(on_step): value for e, value in found if e.logger}
        self.bar = {e.named(on_step): value for e, value in found if e.prog_bar}
        self.callback: dict[str, Any] = {}
        for entry, value in found:
            if training or not on_step:
                self.callback[entry.plain()] = self.callback[entry.named(on_step)] = value


def _number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UserError(
                f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: expected one number."
            )
        value = value.detach().reshape(())
        return (
            value.clone() if value.dtype in (torch.float32, torch.float64) else value.float()
        )  # it may change later
    if isinstance(value, (int, float, numbers.Real)):  # NumPy's too
        return torch.tensor(float(value))
    raise UserError(
        f"self.log({name!r}) was given {type(value).__name__}: expected one number, or a tensor with one."
    )


def _computed(value: Any) -> Any:
    """A torchmetrics.Metric's value of this batch: None if `update` was called, which computes none."""
    return value._forward_cache if hasattr(value, "compute") else value


def _over_ranks(reduce: str, totals: Iterable[float]) -> torch.Tensor:
    """In float64; what is not a number anywhere makes the whole so."""
    return functools.reduce(
        REDUCTIONS[reduce], [torch.tensor(total, dtype=torch.float64) for total in totals]
    )


def _divided(entry: Entry, total: Any, weight: float | None) -> Any:
    """A mean, from its total; not a number where nothing was counted. A torchmetrics.Metric's value has no weight."""
    if entry.reduce != "mean" or weight is None:
        return total
    return total / weight if weight else math.nan


def _settings(entry: Entry) -> tuple:
    return tuple(getattr(entry, name) for name in Entry.__slots__[:9])
