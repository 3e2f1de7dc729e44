"""Lets the profiler measure the calls of a function."""

from collections.abc import Callable
from typing import Any

from multigpu.trainer.profiler import PassThroughProfiler


def profiled(
    profiler: PassThroughProfiler | None, name: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function`, measured under `name`; without a profiler, `function` itself."""
    if profiler is None:
        return function

    def measured(*args: Any, **keywords: Any) -> Any:
        with profiler.profile(name):
            return function(*args, **keywords)

    return measured
