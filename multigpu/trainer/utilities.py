"""Small things that people import from lightning.pytorch.utilities."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from multigpu.launch.world import find


def rank_zero_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which on the other ranks does nothing, and gives None."""

    @wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if find().rank == 0 else None

    return on_rank_zero


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """`print`, on rank 0 alone."""
    print(*args, **kwargs)
