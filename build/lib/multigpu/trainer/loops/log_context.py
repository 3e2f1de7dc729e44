"""What `self.log` must know about its caller: which hook runs, and on which micro-batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.trainer.loops.results import Results


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

    results: "Results"
    hook: str = ""
    micro_batch: Any = None
    batch_size: int | None = None
