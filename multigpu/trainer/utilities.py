"""Functions that people import from lightning.pytorch.utilities."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from multigpu.errors import UserError
from multigpu.launch.world import find_world
from multigpu.trainer.hyperparameters import AttributeDict
from multigpu.trainer.refused import refused_names

__all__ = [
    "AttributeDict",
    "MisconfigurationException",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

# What this library raises where Lightning raises a MisconfigurationException.
MisconfigurationException = UserError

__getattr__ = refused_names(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class RankZeroOnly:
    """The decorator `rank_zero_only`: a function runs on rank 0; elsewhere it returns None."""

    def __init__(self) -> None:
        self._given: int | None = None

    @property
    def rank(self) -> int:
        """This process's rank; code for Lightning reads `rank_zero_only.rank`, or sets it."""
        return find_world().rank if self._given is None else self._given

    @rank.setter
    def rank(self, rank: int) -> None:
        self._given = rank

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        @wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if self.rank == 0 else None

        return on_rank_zero


rank_zero_only = RankZeroOnly()


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only."""
    print(*args, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str, stacklevel: int = 3, category: type = UserWarning) -> None:
    """Warn on rank 0 only."""
    warnings.warn(message, category, stacklevel=stacklevel)
