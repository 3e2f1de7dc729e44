"""What is done to each tensor of a batch? In dicts, lists, tuples and dataclasses, whatever they are nested in."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def mapped(
    value: Any,
    function: Callable[[torch.Tensor], Any],
    rest: Callable[[Any], Any] = lambda part: part,
) -> Any:
    """`value` with `function` of its tensors in their places, and `rest` of whatever else is in it. A container is new."""

    def each(part: Any) -> Any:
        return mapped(part, function, rest)

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (dict, UserDict)):
        new = copy.copy(value)  # a defaultdict stays one
        new.update((key, each(part)) for key, part in value.items())
        return new
    if isinstance(value, Mapping):
        parts = {key: each(part) for key, part in value.items()}
        try:
            return type(value)(parts)
        except TypeError:  # it is made of something else
            return parts
    if hasattr(value, "to"):  # a PackedSequence, or a batch that moves itself
        return rest(value)
    if isinstance(value, (list, tuple)):
        return (
            type(value)(*map(each, value))
            if hasattr(value, "_fields")
            else type(value)(map(each, value))
        )
    if is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)  # its __init__ may do more than to keep what it is given
        for field in fields(value):
            if field.init:
                object.__setattr__(new, field.name, each(getattr(value, field.name)))
        return new
    return rest(value)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`, in order: in mappings, dataclasses, and whatever else can be iterated over twice."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts: Iterable = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, Iterable):
        # An iterator would be used up. NumPy's arrays hold no tensor, and looking takes long.
        parts = (
            ()
            if isinstance(value, (str, bytes, Iterator)) or hasattr(value, "__array__")
            else value
        )
    elif is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in fields(value))
    for part in parts:
        yield from tensors(part)


def rows_of(batch: Any) -> int | None:
    """The length of dimension 0 of the first tensor in the batch (1 if it has none); None without a tensor."""
    return next((len(tensor) if tensor.ndim else 1 for tensor in tensors(batch)), None)
