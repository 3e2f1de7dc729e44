"""Functions that people import from lightning.pytorch.utilities."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from multigpu.errors import UserError
from multigpu.launch.world import find_world
from multigpu.trainer.checkpointing.attribute_dict import AttributeDict
from multigpu.trainer.hooks import to_device
from multigpu.trainer.refused import refused_names
from multigpu.trainer.seed import preserved_random_states

__all__ = [
    "AttributeDict",
    "MisconfigurationException",
    "grad_norm",
    "isolate_rng",
    "move_data_to_device",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

# Types that steps and hooks are annotated with.
STEP_OUTPUT = torch.Tensor | Mapping[str, Any] | None
EVAL_DATALOADERS = Any
TRAIN_DATALOADERS = Any
OptimizerLRScheduler = Any
# Lightning's names of two functions of this library.
move_data_to_device = to_device
isolate_rng = preserved_random_states
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


def grad_norm(
    module: nn.Module, norm_type: float | str, group_separator: str = "/"
) -> dict[str, torch.Tensor]:
    """The p-norm of each gradient, and of all of them together, by Lightning's names.

    norm_type         p; "inf" or math.inf for the largest absolute value
    group_separator   put between the norm's name and the parameter's, as in
                      "grad_2.0_norm/layer.weight"

    Raises UserError if norm_type is not above 0.
    """
    p = float(norm_type)
    if p <= 0:
        raise UserError(f"grad_norm: norm_type is {norm_type!r}: expected a number above 0.")
    prefix = f"grad_{p}_norm"
    norms = {
        f"{prefix}{group_separator}{name}": parameter.grad.detach().norm(p)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"{prefix}_total"] = torch.stack(list(norms.values())).norm(p)
    return norms


@rank_zero_only
def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only."""
    print(*args, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str, stacklevel: int = 3, category: type = UserWarning) -> None:
    """Warn on rank 0 only."""
    warnings.warn(message, category, stacklevel=stacklevel)
