"""Random numbers that would differ between one rank and several: of rows, and of dropout."""

import functools
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import seed as seed_numpy
from torch import nn
from torch.utils.data._utils.fetch import _MapDatasetFetcher

# The rows of a DataLoader's iteration after which a dataset counts as one without random
# numbers, if it has drawn none. To save and compare the generators' states takes 0.1 ms a row.
LOOKED_AT = 8
# torch's functions with dropout → the place and the name of its probability.
WITH_DROPOUT = {
    (F, name): (1, "p")
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
                 "feature_alpha_dropout")
} | {
    (torch, "dropout"): (1, "p"),
    (F, "scaled_dot_product_attention"): (4, "dropout_p"),
}  # fmt: skip


def seed_rows() -> None:
    """Let a row that its dataset draws at random depend on its number alone.

    A random crop of row 7 is then the same crop in each run, on each rank and in each epoch.
    The generators are afterwards as they were before the row.
    """
    original = _MapDatasetFetcher.fetch

    @functools.wraps(original)
    def fetch(self: _MapDatasetFetcher, numbers: Any) -> Any:
        looked_at = getattr(self, "_rows_without_draws", 0)
        if not self.auto_collation or looked_at >= LOOKED_AT:
            return original(self, numbers)
        rows = []
        for number in numbers:
            row, drew = _row(self.dataset, number)
            rows.append(row)
            looked_at = 0 if drew else looked_at + 1
        self._rows_without_draws = looked_at
        return self.collate_fn(rows)

    _MapDatasetFetcher.fetch = fetch


def _row(dataset: Any, number: Any) -> tuple[Any, bool]:
    """A row, drawn with the seed of its number, and whether it has drawn random numbers."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed = zlib.crc32(repr(number).encode())
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    seed_numpy(seed)
    seeded = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        several = getattr(dataset, "__getitems__", None)
        row = several([number])[0] if several else dataset[number]
        drew = (
            not torch.equal(torch.get_rng_state(), seeded[0])
            or random.getstate() != seeded[1]
            or not _same_numpy(np.random.get_state(), seeded[2])
        )
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
    return row, drew


def _same_numpy(state: tuple, other: tuple) -> bool:
    """Whether two states are equal: the place alone is the same again after 624 words."""
    return state[2] == other[2] and np.array_equal(state[1], other[1])


def switch_dropout_off() -> None:
    """Let torch's functions drop nothing; keep_all does the same for modules of a model."""
    for (owner, name), (place, keyword) in WITH_DROPOUT.items():
        setattr(owner, name, _without_dropout(getattr(owner, name), place, keyword))


def keep_all(model: nn.Module) -> None:
    """Let a model's modules that draw without torch's functions of dropout drop nothing.

    Those are stochastic depth (DropPath of timm and many models, torchvision's
    StochasticDepth), and recurrent layers with dropout between them.
    """
    for module in model.modules():
        kind = type(module).__name__
        if "DropPath" in kind:
            module.drop_prob = 0.0
        elif kind == "StochasticDepth":
            module.p = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def _without_dropout(original: Callable, place: int, keyword: str) -> Callable:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        else:
            kwargs[keyword] = 0.0
        return original(*args, **kwargs)

    return function
