"""Decisions by numbers inside torch and in math, where tensors have only shapes."""

from collections.abc import Callable
from typing import Any

import torch

from multigpu.virtual.ops.errors import no_numbers_error
from multigpu.virtual.ops.unknown import Unknown
from multigpu.virtual.sim import machine, names

MATH = ("isnan", "isinf", "isfinite")


def tensors_have_shapes_only() -> bool:
    """Whether a machine runs that computes no numbers."""
    running = machine.running()
    return running is not None and not running.compute


def truncated_normal(original: Callable) -> Callable:
    """torch.nn.init's function, which draws again while a number is outside of the limits."""

    def _no_grad_trunc_normal_(
        tensor: torch.Tensor, mean: float, std: float, *limits: Any, generator: Any = None
    ) -> torch.Tensor:
        if not names.is_virtual(tensor.device):
            return original(tensor, mean, std, *limits, generator=generator)
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    return _no_grad_trunc_normal_


def math_function(original: Callable[[float], bool]) -> Callable[[float], bool]:
    """A function of MATH. Raises RuntimeError for an unknown number, which is NaN to math."""

    def decide(number: float, /) -> bool:
        if isinstance(number, Unknown):
            raise no_numbers_error(f"math.{original.__name__}()")
        return original(number)

    decide.__name__ = original.__name__
    return decide
