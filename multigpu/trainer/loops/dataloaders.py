"""Which batches a rank gets: a shard of the samples, or every n-th batch.

Training uses DistributedSampler, as Lightning does: all ranks make the same number of steps,
and some samples come twice. Evaluation shards whole batches, so that each sample counts once
and the user's order is kept.
"""

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from multigpu.trainer.trainer import Trainer


class SamplerLength:
    """A sampler as the data set that DistributedSampler asks for: only its length is used."""

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)


class ShardedSampler(DistributedSampler):
    """The user's own sampler, sharded over the ranks.

    All ranks draw with the same seed, anew each epoch.
    """

    def __init__(self, sampler: Any, num_shards: int, index: int):
        super().__init__(SamplerLength(sampler), num_shards, index, shuffle=False)
        self.original = sampler

    def __iter__(self) -> Iterator:
        # The ranks' own random states may differ.
        with seed.same_seed(seed.data_seed() + self.epoch):
            order = list(self.original)
        return (order[place] for place in super().__iter__())


class EveryNthBatch(Sampler):
    """Of the batches that a sampler gives, those of one shard: index, index + num_shards, …"""

    def __init__(self, batches: Any, num_shards: int, index: int):
        self.batches = batches
        self.num_shards = num_shards
        self.index = index

    def __iter__(self) -> Iterator:
        # A random sampler of the user's must give the same batches on all ranks.
        with seed.same_seed(seed.data_seed()):
            batches = list(self.batches)
        yield from batches[self.index :: self.num_shards]

    def __len__(self) -> int:
        return len(range(self.index, len(self.batches), self.num_shards))


def prepare_for_rank(trainer: "Trainer", loader: Any, training: bool) -> Any:
    """This rank's shard of a dataloader, or the loader itself; its workers are seeded."""
    if trainer.use_distributed_sampler:
        keep_order = bool(trainer.overfit_batches)
        loader = shard_loader(loader, trainer.strategy.shard, training, keep_order)
    seed.seed_workers(loader, trainer.global_rank)
    return loader


def shard_loader(
    loader: Any, shard: tuple[int, int], training: bool, keep_order: bool = False
) -> Any:
    """The same DataLoader with one shard of the data.

    shard        (number of shards, index of this one)
    keep_order   do not shuffle (overfit_batches)

    What is no DataLoader, or has no order of its own (an IterableDataset), is returned
    unchanged: the user shards it. Raises UserError for a batch sampler that cannot be sharded.
    """
    num_shards, index = shard
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    shuffled = isinstance(loader.sampler, RandomSampler)
    if keep_order and shuffled:
        loader = _with_sampler(loader, SequentialSampler(loader.dataset))
    if num_shards == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if not training:
        return _shard_by_batch(loader, num_shards, index, shuffled)
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise UserError(
            f"a DataLoader with a batch_sampler of its own "
            f"({type(loader.batch_sampler).__name__}) cannot be shared by {num_shards} ranks: "
            f"shard it yourself, and give Trainer(use_distributed_sampler=False)."
        )
    in_order = isinstance(loader.sampler, SequentialSampler)
    if in_order or (shuffled and _draws_each_once(loader)):
        sampler = DistributedSampler(
            loader.dataset,
            num_shards,
            index,
            shuffle=shuffled and not keep_order,
            seed=seed.data_seed(),
        )
        return _with_sampler(loader, sampler)
    return _with_sampler(loader, ShardedSampler(loader.sampler, num_shards, index))


def _shard_by_batch(
    loader: DataLoader, num_shards: int, index: int, shuffled: bool
) -> DataLoader:
    """Every num_shards-th batch.

    A loader that shuffles is read in order, as each rank would shuffle by itself.
    """
    if shuffled:
        loader = _with_sampler(loader, SequentialSampler(loader.dataset))
    batches = num_batches(loader)
    if batches == float("inf"):
        raise UserError(
            f"a DataLoader whose batch_sampler has no length cannot be shared by {num_shards} "
            f"ranks: give it a __len__, or shard it yourself, and give "
            f"Trainer(use_distributed_sampler=False)."
        )
    if batches < num_shards and is_rank_zero():
        warnings.warn(
            f"{pluralize(int(batches), 'batch')} to evaluate for {num_shards} ranks, so some "
            f"get none: a smaller batch_size gives each rank one.",
            stacklevel=2,
        )
    # With batch_size=None the sampler itself gives whole batches.
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return _with_sampler(loader, None, EveryNthBatch(sampler, num_shards, index))


def _draws_each_once(loader: DataLoader) -> bool:
    """Whether its RandomSampler draws each row once, as that of shuffle=True does."""
    return not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)


def _with_sampler(loader: DataLoader, sampler: Any, batches: Any = None) -> DataLoader:
    """A copy of the loader, of its own class, that draws from another sampler or from another
    batch sampler.

    A loader with batch_size=None uses its sampler as the batch sampler.
    """
    changed = copy.copy(loader)
    if loader.batch_sampler is None:
        sampler = sampler if batches is None else batches
        batches = None
    elif batches is None:
        batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    # DataLoader.__setattr__ refuses these names.
    changed.__dict__.update(batch_sampler=batches, _iterator=None)
    if sampler is not None:
        changed.__dict__["sampler"] = sampler
    return changed


def start_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers that shuffle by epoch which epoch it is."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def num_batches(loader: Any) -> float:
    """Batches of the loader; infinity where it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def limit_batches(batches: float, limit: int | float | None, name: str) -> float:
    """At most `limit` batches: a number, or a fraction of them (1.0 is all)."""
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return batches
    if isinstance(limit, float):
        if batches == float("inf"):
            raise UserError(
                f"{name}={limit}: a fraction of a loader without a length is unknown. Give a "
                f"number of batches."
            )
        if limit and batches and batches * limit < 1:
            digits = len(str(batches)) + 1
            least = math.ceil(10**digits / batches) / 10**digits
            raise UserError(
                f"{name}={limit} of {batches} batches is less than one: give at least {least}."
            )
        return int(batches * limit)
    return min(batches, limit)


def as_list(loaders: Any) -> list:
    """One loader, or several for evaluation: a list, or a dict, whose names have no effect."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
