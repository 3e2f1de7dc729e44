"""The numbers of two runs of a script, compared."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import torch

# Two runs of a script whose weights differ by no more have the same weights.
SAME_WEIGHTS = 1e-6


@dataclass(frozen=True)
class Comparison:
    """compared   how many losses, or tensors of a checkpoint, both runs have
    equal       whether all agree: losses to the printed digits, weights within SAME_WEIGHTS
    difference  the largest difference
    rounded     losses that agree but for one unit of their last printed digit
    """

    compared: int
    equal: bool
    difference: float
    rounded: int = 0


def losses(output: str, pattern: str) -> list[str]:
    """The losses that a run printed, as printed, sorted: ranks print in any order."""
    found = re.findall(pattern, output)
    single = [text for match in found for text in ([match] if type(match) is str else match)]
    return sorted(single, key=lambda text: (float(text), text))


def scalars(path: Path) -> list[str]:
    """The scalars of a TensorBoard file, sorted."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    values = [
        value for event in EventFileLoader(str(path)).Load() for value in event.summary.value
    ]
    return [str(number) for number in sorted(value.tensor.float_val[0] for value in values)]


def compare_losses(one: list[str], other: list[str]) -> Comparison:
    """Compare what `losses` found. Raises ValueError if the runs have no or unequal counts.

    Numbers that differ in their last bits can be printed with another last digit, if they are
    near the middle of two. Up to a fifth of the losses may.
    """
    if not one or len(one) != len(other):
        raise ValueError(f"{len(one)} losses on virtual GPUs, {len(other)} on the CPU")
    pairs = [(Decimal(a), Decimal(b)) for a, b in zip(one, other, strict=True) if a != b]
    rounded = sum(
        abs(a - b) == Decimal(1).scaleb(a.as_tuple().exponent)
        and a.as_tuple().exponent == b.as_tuple().exponent
        for a, b in pairs
        if a.is_finite() and b.is_finite()
    )
    equal = rounded == len(pairs) and 5 * rounded <= len(one)
    differences = [abs(float(a) - float(b)) for a, b in zip(one, other, strict=True)]
    return Comparison(len(one), equal, max(differences), rounded)


def compare_weights(one: Path, other: Path) -> Comparison:
    """Compare the tensors of two checkpoints, by name.

    Raises ValueError if a checkpoint has no tensor, or another name than the other has, or
    numbers that are not finite.
    """
    first, second = _tensors(_load(one)), _tensors(_load(other))
    if not first or first.keys() != second.keys():
        raise ValueError(f"{one.name} holds {len(first)} tensors, on the CPU {len(second)}")
    differences = [
        (first[name].double() - second[name].double()).abs().max().item() for name in first
    ]
    if not math.isfinite(sum(differences)):
        raise ValueError(f"{one.name} holds numbers that are not finite")
    return Comparison(len(first), max(differences) <= SAME_WEIGHTS, max(differences))


def _load(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors with elements in nested dicts and lists, by their path."""
    if isinstance(value, torch.Tensor):
        return {name: value} if value.numel() else {}
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    found = {}
    for key, item in items:
        found.update(_tensors(item, f"{name}.{key}"))
    return found
