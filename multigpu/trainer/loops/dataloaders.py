"""Which batches does this rank get? In training a share of each epoch's images; in evaluation every n-th batch.

Training uses DistributedSampler, as Lightning does: all ranks make the same number of steps, some images come twice. Evaluation
deals out whole batches, so that each image counts once and the user's order is kept.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from multigpu.errors import UserError, pluralize
from multigpu.launch.world import is_rank_zero
from multigpu.trainer import seed


class Drawn:
    """What a user's own sampler gives, as a data set whose order DistributedSampler deals out: drawn anew each epoch."""

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)


class SharedSampler(DistributedSampler):
    """A sampler of the user's, dealt out over the ranks. All of them draw by the same seed, anew each epoch."""

    def __init__(self, sampler: Any, parts: int, mine: int):
        super().__init__(Drawn(sampler), parts, mine, shuffle=False)
        self.theirs = sampler

    def __iter__(self) -> Iterator:
        with seed.alike(
            seed.of_the_data() + self.epoch
        ):  # the ranks' random states may have gone apart
            order = list(self.theirs)
        return (order[place] for place in super().__iter__())


class EveryNth(Sampler):
    """Of the batches that a sampler gives, those that one rank takes: mine, mine + parts, …"""

    def __init__(self, batches: Any, parts: int, mine: int):
        self.batches, self.parts, self.mine = batches, parts, mine

    def __iter__(self) -> Iterator:
        with seed.alike(
            seed.of_the_data()
        ):  # a random sampler of the user's must give the same on all ranks
            batches = list(self.batches)
        for place, batch in enumerate(batches):
            if place % self.parts == self.mine:
                yield batch

    def __len__(self) -> int:
        return len(range(self.mine, len(self.batches), self.parts))


def deal(loader: Any, shard: tuple[int, int], training: bool, in_order: bool = False) -> Any:
    """The same DataLoader with this rank's share. `in_order`: not shuffled (overfit_batches).

    One that is no DataLoader, or has no order of its own (an IterableDataset), comes back as it is: it must share itself.
    """
    parts, mine = shard
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    shuffled = isinstance(loader.sampler, RandomSampler)
    if in_order and shuffled:
        loader = _with(loader, SequentialSampler(loader.dataset))
    if parts == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if not training:
        if shuffled:  # else each rank shuffles by itself
            loader = _with(loader, SequentialSampler(loader.dataset))
        if (batches := length(loader)) == float("inf"):
            raise UserError(
                f"a DataLoader whose batch_sampler has no length cannot be shared by {parts} ranks: give it a __len__, or share "
                f"it yourself, and give Trainer(use_distributed_sampler=False)."
            )
        if batches < parts and is_rank_zero():
            warnings.warn(
                f"{pluralize(int(batches), 'batch')} to evaluate for {parts} ranks, so some get none: a smaller batch_size gives "
                f"each of them one.",
                stacklevel=2,
            )
        return _with(loader, None, EveryNth(_batches(loader), parts, mine))
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise UserError(
            f"a DataLoader with a batch_sampler of its own ({type(loader.batch_sampler).__name__}) cannot be shared by "
            f"{parts} ranks: share it yourself, and give Trainer(use_distributed_sampler=False)."
        )
    if isinstance(loader.sampler, SequentialSampler) or (shuffled and _whole(loader)):
        shuffle = shuffled and not in_order
        return _with(
            loader,
            DistributedSampler(
                loader.dataset, parts, mine, shuffle=shuffle, seed=seed.of_the_data()
            ),
        )
    return _with(loader, SharedSampler(loader.sampler, parts, mine))


def _whole(loader: DataLoader) -> bool:
    """Does its RandomSampler give each row once? So does shuffle=True."""
    return not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)


def _with(loader: DataLoader, sampler: Any, batches: Any = None) -> DataLoader:
    """A copy of the loader, of its own class, that draws from another sampler.

    One with batch_size=None takes what its sampler gives as the batches.
    """
    changed = copy.copy(loader)
    if loader.batch_sampler is None:
        sampler, batches = sampler if batches is None else batches, None
    elif batches is None:
        batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    changed.__dict__.update(batch_sampler=batches, _iterator=None)
    if sampler is not None:
        changed.__dict__["sampler"] = sampler
    return changed


def _batches(loader: DataLoader) -> Any:
    """What gives its batches' rows."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def start_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers that shuffle by epoch which one it is."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def length(loader: Any) -> float:
    """Batches that this rank gets; infinity where nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def limited(batches: float, limit: int | float | None, name: str) -> float:
    """At most `limit` batches: a number, or a share of them (1.0 is all)."""
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return batches
    if isinstance(limit, float):
        if batches == float("inf"):
            raise UserError(
                f"{name}={limit}: a share of a loader without a length. Give a number of batches."
            )
        if limit and batches and batches * limit < 1:
            places = len(str(batches)) + 1
            least = math.ceil(10**places / batches) / 10**places
            raise UserError(
                f"{name}={limit} of {batches} batches is less than one: give at least {least}."
            )
        return int(batches * limit)
    return min(batches, limit)


def listed(loaders: Any) -> list:
    """One loader, or several for evaluation: a list of them, or a dict, whose names do not matter."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
