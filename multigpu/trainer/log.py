"""`self.log`: which hook runs, where its values go, and which loggers get them.

results.py collects and reduces the values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from multigpu.trainer.results import Metrics, Results

if TYPE_CHECKING:
    from multigpu.trainer.module import LightningModule
    from multigpu.trainer.trainer import Trainer


@dataclass(frozen=True, slots=True)
class LogContext:
    """The caller of `self.log`: it is set on the module while a hook runs.

    results       where the values go
    hook          the hook that runs; "" between hooks, where `self.log` raises an error
    micro_batch   the part of the batch that the step was called with; None: the whole batch
    batch_size    the rows that a value stands for, unless `self.log` is given a number; None:
                  those of the batch

    It is an attribute of the module, not a global: each of DataParallel's replicas is a copy
    of the module with its own attributes, so replicas in different threads have different
    contexts.
    """

    results: Results
    hook: str = ""
    micro_batch: Any = None
    batch_size: int | None = None


class Log:
    """What a run logs. Each loop sets `results`, where the values of its hooks go."""

    def __init__(self, trainer: "Trainer", module: "LightningModule", results: Results):
        self.trainer = trainer
        self.module = module
        self.results = results
        self.outside()

    def outside(self) -> None:
        """No hook runs: `self.log` raises an error."""
        self.module.__dict__["_log_context"] = LogContext(self.results)

    @contextmanager
    def within(self, hook: str, batch_size: int | None = None) -> Iterator[None]:
        """A context in which `hook` is the hook that runs."""
        attributes = self.module.__dict__
        previous = attributes["_log_context"]
        attributes["_log_context"] = LogContext(self.results, hook, batch_size=batch_size)
        try:
            yield
        finally:
            attributes["_log_context"] = previous

    def send(self, metrics: Metrics, offset: int = 0, batch: int | None = None) -> None:
        """Give the values to the loggers, as of the step `batches_that_stepped` + `offset`.

        A logged value with the name "step" replaces this number; otherwise "epoch" is added.

        batch   the values are those of this batch of an evaluation, and it is the x axis
        """
        loggers = self.trainer.loggers  # a hook may have replaced them
        if not metrics.logged or not loggers:
            return
        state = self.trainer.state
        values = {name: float(value) for name, value in metrics.logged.items()}
        if batch is not None:
            step = batch
        elif "step" in values:
            step = int(values.pop("step"))
        else:
            step = state.batches_that_stepped + offset
            values.setdefault("epoch", state.current_epoch)
        for logger in loggers:
            logger.log_metrics(metrics=dict(values), step=step)
