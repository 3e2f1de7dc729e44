"""How many rows has a batch? A mean over batches weighs each by them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def rows_of(batch: Any) -> int | None:
    """The length of dimension 0 of the first tensor in the batch (1 if it has none); None without a tensor.

    Looked for where Lightning looks: in mappings, whatever can be iterated over, and dataclasses.
    """
    return next(_sizes(batch), None)


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        yield len(batch) if batch.ndim else 1
    elif hasattr(batch, "__array__"):  # NumPy's: no tensor is in there, and looking takes long
        return
    elif isinstance(batch, Mapping):
        yield from _of_parts(batch.values())
    elif isinstance(batch, Iterable) and not isinstance(batch, (str, bytes, Iterator)):  # an iterator would be used up
        yield from _of_parts(batch)
    elif is_dataclass(batch):
        yield from _of_parts(getattr(batch, field.name) for field in fields(batch))


def _of_parts(parts: Iterable) -> Iterator[int]:
    for part in parts:
        yield from _sizes(part)
