"""Functions that people import from lightning.pytorch.utilities."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from multigpu.errors import UserError
from multigpu.launch.world import is_rank_zero
from multigpu.trainer.hyperparameters import AttributeDict
from multigpu.trainer.refused import refused_names

__all__ = [
    "AttributeDict",
    "MisconfigurationException",
    "rank_zero_only",
]

# What this library raises where Lightning raises a MisconfigurationException.
MisconfigurationException = UserError

__getattr__ = refused_names(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """A decorator: the function runs on rank 0; elsewhere it returns None."""

    @wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return on_rank_zero
