"""A number for each row of a batch, so that rows can be found again on another rank."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from multigpu.prove.inside.host import numbers

# Of longer rows, so many elements are taken, at equal distances.
MOST = 4096


def rows_of(args: tuple, kwargs: dict[str, Any]) -> np.ndarray | None:
    """For each row of the batch among the arguments of a forward, a number, float64.

    The batch is the largest tensor: under DDP, Lightning's module gets the labels, too, and
    the model inside it does not. The number is the product of the row with fixed random
    numbers: equal rows have equal numbers, whatever zeros follow. What an attention_mask hides
    counts as zero, and positions 0, 1, 2, … are no data. None if no argument is a tensor with
    rows, or if another module has computed one.
    """
    tensors = [
        tensor for tensor in _tensors((args, kwargs)) if tensor.dim() and tensor.numel()
    ]
    mask = next(_masks((args, kwargs)), None)
    if not tensors or needs_grad(args, kwargs):
        return None
    # Tensors without numbers, of torch.func, or of other layouts have none.
    with suppress(RuntimeError, NotImplementedError, TypeError), torch.no_grad():
        data = [tensor for tensor in tensors if not _are_positions(tensor)] or tensors
        batch = max(data, key=torch.Tensor.numel)
        if mask is not None and batch.shape == mask.shape:
            batch = batch * mask
        return _project(numbers(batch))
    return None


def width_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """The elements of a row of the largest tensor: batches of padded rows differ in it."""
    tensors = (tensor for tensor in _tensors((args, kwargs)) if tensor.dim())
    largest = max(tensors, key=torch.Tensor.numel)
    return largest.numel() // max(len(largest), 1)


def needs_grad(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an argument is a tensor that needs a gradient."""
    return any(tensor.requires_grad for tensor in _tensors((args, kwargs)))


def _masks(value: Any) -> Iterator[torch.Tensor]:
    """The attention masks of shape (rows, length) among arguments."""
    if isinstance(value, Mapping):
        mask = value.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            yield mask
    entries = value.values() if isinstance(value, Mapping) else value
    for entry in entries if isinstance(value, Mapping | list | tuple) else ():
        yield from _masks(entry)


def _are_positions(tensor: torch.Tensor) -> bool:
    """Whether each row of a tensor of integers, (rows, length), is 0, 1, 2, …"""
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.shape[1] < 2:
        return False
    values = numbers(tensor)
    return bool((values == torch.arange(values.shape[1], device="cpu")).all())


def outputs_of(result: Any, count: int) -> np.ndarray:
    """For each of `count` rows of what a module returned, a number; empty if it has none."""
    for tensor in _tensors(result):
        if tensor.dim() and tensor.shape[0] == count and tensor.is_floating_point():
            with suppress(RuntimeError, NotImplementedError, TypeError), torch.no_grad():
                return _project(numbers(tensor))
    return np.zeros(0)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _project(batch: torch.Tensor) -> np.ndarray:
    rows = batch.reshape(batch.shape[0], -1)
    if rows.shape[1] > MOST:
        rows = rows[:, torch.arange(MOST, device="cpu") * rows.shape[1] // MOST]
    return (rows.double() @ _directions()[: rows.shape[1]]).numpy()


@functools.cache
def _directions() -> torch.Tensor:
    # The program can have another default device.
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(MOST, generator=generator, dtype=torch.float64, device="cpu")
