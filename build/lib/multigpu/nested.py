"""The tensors of a batch, in dicts, lists, tuples and dataclasses, nested in any way."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def map_tensors(
    value: Any,
    function: Callable[[torch.Tensor], Any],
    rest: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """A copy of `value`: each tensor t becomes function(t), any other leaf rest(leaf).

    Containers become new objects of the same type, if that type can be made from its items.
    """

    def map_item(item: Any) -> Any:
        return map_tensors(item, function, rest)

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (dict, UserDict)):
        # copy.copy keeps the type, such as defaultdict
        new = copy.copy(value)
        new.update((key, map_item(item)) for key, item in value.items())
        return new
    if isinstance(value, Mapping):
        items = {key: map_item(item) for key, item in value.items()}
        try:
            return type(value)(items)
        except TypeError:
            # The type's constructor does not take a dict.
            return items
    if hasattr(value, "to"):
        # a PackedSequence, or a batch that moves itself
        return rest(value)
    if isinstance(value, (list, tuple)):
        items = map(map_item, value)
        is_namedtuple = hasattr(value, "_fields")
        return type(value)(*items) if is_namedtuple else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        # copy.copy, because __init__ can do more than store its arguments
        new = copy.copy(value)
        for field in fields(value):
            if field.init:
                object.__setattr__(new, field.name, map_item(getattr(value, field.name)))
        return new
    return rest(value)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`, in order, from mappings, dataclasses and other iterables.

    Iterators are not read, because reading would exhaust them.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in _items(value):
        yield from tensors(item)


def _items(value: Any) -> Iterable:
    """The items of a container; () for anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, Iterable):
        # A NumPy array holds no tensor, and iterating over it takes long.
        if isinstance(value, (str, bytes, Iterator)) or hasattr(value, "__array__"):
            return ()
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def count_rows(batch: Any) -> int | None:
    """The length of dimension 0 of the first tensor, 1 for a scalar; None without tensors."""
    first = next(tensors(batch), None)
    if first is None:
        return None
    return len(first) if first.ndim else 1
