"""Functions that people import from lightning.pytorch.utilities."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from multigpu.launch.world import find_world

P = ParamSpec("P")
R = TypeVar("R")


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Make `function` run on rank 0 only; on other ranks it returns None."""

    @wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if find_world().rank == 0 else None

    return on_rank_zero


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only."""
    print(*args, **kwargs)
