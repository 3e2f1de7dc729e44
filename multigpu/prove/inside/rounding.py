"""Makes a run round in another way, to measure how far rounding alone drives it.

Two changes, none of which alters what the program computes in exact arithmetic by more than
one unit in the last place of its weights:

- each weight begins one unit in the last place higher or lower;
- each layer with weights computes its batch in parts, so that the gradients of its weights are
  sums of parts, each of which is rounded. So does a batch that is divided over ranks.

Of weights in 16 bit, a unit in the last place is no small change: their gradients are rounded
once more before each step (recorder.py).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from multigpu.prove.inside.host import bare
from multigpu.prove.record import COARSE
from multigpu.prove.settings import SEED, Settings

# Functions of (batch, weight, …) that treat each row of a batch by itself.
ROWWISE = (
    *(
        (F, name, 0)
        for name in (
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
    ),
    (torch, "matmul", 0),
    (torch, "mm", 0),
    (torch.Tensor, "matmul", 0),
    (torch.Tensor, "__matmul__", 0),
    # (bias, batch, weight)
    (torch, "addmm", 1),
)
PRODUCTS = ("matmul", "mm", "__matmul__", "addmm")


def start(settings: Settings) -> None:
    """From now on disturb first weights and split batches, as the settings say."""
    if settings.split > 1:
        for owner, name, place in ROWWISE:
            _split(owner, name, place, settings.split)
    if settings.disturb:
        _disturb(settings.disturb)


def _split(owner: Any, name: str, place: int, parts: int) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def split(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not _has_rows(name, args, place) or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        batch = args[place]
        return torch.cat(
            [
                original(*args[:place], piece, *args[place + 1 :], **kwargs)
                for piece in batch.tensor_split(min(parts, batch.shape[0]))
            ]
        )

    setattr(owner, name, split)


def _has_rows(name: str, args: tuple, place: int) -> bool:
    """Whether the argument at `place` is a batch; in a product, one with weights."""
    batch = args[place] if len(args) > place else None
    if not isinstance(batch, torch.Tensor) or hasattr(batch, "_local_tensor"):
        return False
    if batch.dim() < 2 or batch.shape[0] < 2:
        return False
    if name not in PRODUCTS:
        return True
    weights = args[place + 1] if len(args) > place + 1 else None
    if name == "addmm" and getattr(args[0], "dim", int)() != 1:
        return False
    return isinstance(weights, torch.Tensor) and weights.dim() == 2 and weights.requires_grad


def _disturb(units: int) -> None:
    """Disturb the weights of each outermost module before its first forward with gradients."""
    original: Callable = nn.Module.__call__
    seen: set[int] = set()

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            generator = torch.Generator("cpu").manual_seed(SEED + units + len(seen))
            parameters = _new(self, seen)
            for parameter in parameters:
                _add_units(parameter, units, _typical(parameters), generator)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = __call__


def _new(module: nn.Module, seen: set[int]) -> list[torch.Tensor]:
    if id(module) in seen:
        return []
    seen.update(id(submodule) for submodule in module.modules())
    parameters = [p for p in module.parameters() if id(p) not in seen]
    seen.update(map(id, parameters))
    return [parameter for parameter in parameters if _has_memory(parameter)]


def _has_memory(parameter: torch.Tensor) -> bool:
    """False for a weight that is freed until its module computes, as in ZeRO-3 by hand."""
    if parameter.layout is not torch.strided:
        return True
    return bare(parameter).untyped_storage().nbytes() > 0 or not parameter.numel()


def _typical(parameters: list[torch.Tensor]) -> float:
    """The root mean square of all weights."""
    values = [
        bare(parameter).detach().double()
        for parameter in parameters
        if parameter.is_floating_point()
    ]
    count = sum(value.numel() for value in values)
    return math.sqrt(sum(float(value.square().sum()) for value in values) / max(count, 1))


def _add_units(
    parameter: torch.Tensor, units: int, typical: float, generator: torch.Generator
) -> None:
    """Disturb a parameter; a zero by a unit of a typical weight, because it has none."""
    if not parameter.is_floating_point() or not parameter.numel():
        return
    eps = torch.finfo(parameter.dtype).eps
    if eps > COARSE:
        # A unit in the last place is no small change: the recorder rounds gradients instead.
        return
    target = bare(parameter)
    signs = torch.randint(2, target.shape, generator=generator, device="cpu") * 2 - 1
    with torch.no_grad():
        sizes = torch.where(target == 0, typical, target.abs())
        target.add_(signs.to(target) * sizes, alpha=units * eps)
