"""What `self.log` has to know about its caller: which hook runs, and on which micro-batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.trainer.loops.results import Results


@dataclass(frozen=True, slots=True)
class LogContext:
    """Set on the module while one of its hooks runs, and passed to Results.log.

    results       where the values go
    hook          the hook that runs; "" between hooks, where `self.log` is refused
    micro_batch   what the step was called with, where that is a part of the batch; None: the
                  whole batch

    The module holds it, not a global: each of DataParallel's replicas is a copy of the module
    with attributes of its own, so replicas in different threads have different contexts.
    """

    results: "Results"
    hook: str = ""
    micro_batch: Any = None
