"""Makes a run round in another way, to measure how far rounding alone drives it.

Two changes, none of which alters what the program computes in exact arithmetic by more than
one unit in the last place of its weights:

- each weight begins one unit in the last place higher or lower;
- each layer with weights computes its batch in parts, so that the gradients of its weights are
  sums of parts, each of which is rounded. So does a batch that is divided over ranks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from multigpu.prove.inside.host import bare
from multigpu.prove.settings import SEED, Settings

# Functions of (batch, weight, …) that treat each row of a batch by itself.
ROWWISE = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "embedding",
)
# A unit in the last place of a coarser type is no small change: there, only the parts count.
COARSE = 2**-20


def start(settings: Settings) -> None:
    """Disturb and split as the settings say."""
    if settings.split > 1:
        for name in ROWWISE:
            _split(name, settings.split)
    if settings.disturb:
        _disturb(settings.disturb)


def _split(name: str, parts: int) -> None:
    original = getattr(F, name)

    @functools.wraps(original)
    def split(batch: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        many = isinstance(batch, torch.Tensor) and batch.dim() > 1 and batch.shape[0] > 1
        if not many or not torch.is_grad_enabled() or hasattr(batch, "_local_tensor"):
            return original(batch, *args, **kwargs)
        pieces = batch.tensor_split(min(parts, batch.shape[0]))
        return torch.cat([original(piece, *args, **kwargs) for piece in pieces])

    setattr(F, name, split)


def _disturb(units: int) -> None:
    """Disturb the weights of each outermost module before its first forward with gradients."""
    original: Callable = nn.Module.__call__
    seen: set[int] = set()

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            generator = torch.Generator().manual_seed(SEED + units + len(seen))
            parameters = _new(self, seen)
            for parameter in parameters:
                _add_units(parameter, units, _typical(parameters), generator)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = __call__


def _new(module: nn.Module, seen: set[int]) -> list[torch.Tensor]:
    if id(module) in seen:
        return []
    seen.update(id(inner) for inner in module.modules())
    parameters = [p for p in module.parameters() if id(p) not in seen]
    seen.update(map(id, parameters))
    return parameters


def _typical(parameters: list[torch.Tensor]) -> float:
    """The root mean square of all weights."""
    values = [bare(parameter).detach().double() for parameter in parameters]
    count = sum(value.numel() for value in values)
    return math.sqrt(sum(float(value.square().sum()) for value in values) / max(count, 1))


def _add_units(
    parameter: torch.Tensor, units: int, typical: float, generator: torch.Generator
) -> None:
    """Disturb a parameter; a zero by a unit of a typical weight, because it has none."""
    eps = torch.finfo(parameter.dtype).eps
    if eps > COARSE or not parameter.numel():
        return
    target = bare(parameter)
    signs = torch.randint(2, target.shape, generator=generator) * 2 - 1
    with torch.no_grad():
        sizes = torch.where(target == 0, typical, target.abs())
        target.add_(signs.to(target) * sizes, alpha=units * eps)
