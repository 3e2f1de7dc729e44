"""Gives each rank its data: a shard of the samples, or every n-th batch.

Training uses DistributedSampler, as Lightning does. All ranks make the same number of steps;
for this, the sampler repeats some samples. Evaluation shards whole batches: each sample counts
once, and the user's order is kept.
"""

import copy
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
from multigpu.strategies import Strategy
from multigpu.trainer import seed
from multigpu.trainer.refused import refuse
from multigpu.trainer.run import Run
from multigpu.trainer.settings import Settings


def find(run: Run, name: str) -> Any:
    """The user's dataloader for `name`: "train", "val", "test" or "predict"; None if there is
    none. With overfit_batches, a fit's rows come in order.
    """
    loader = run.find_loader(name)
    if run.settings.overfit_batches and run.state.fn == "fit":
        if isinstance(loader, (list, tuple, Mapping)):
            loader = [_in_order(run, name, item) for item in as_list(loader)]
        else:
            loader = _in_order(run, name, loader)
    run.state.loaders[name] = loader
    return loader


def _in_order(run: Run, name: str, loader: Any) -> Any:
    """Return the loader with its rows in order, so that overfit_batches repeats batches."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(loader.sampler, SequentialSampler):
        return loader
    run.state.warn_once(
        f"You requested to overfit but enabled {name} dataloader shuffling: its rows are "
        f"read in order, so that each epoch has the same batches."
    )
    return _with_sampler(loader, SequentialSampler(loader.dataset))


class ShardedSampler(DistributedSampler):
    """The user's own sampler, sharded over the ranks.

    All ranks draw with the same seed, which changes every epoch.
    """

    def __init__(self, sampler: Any, num_shards: int, index: int):
        super().__init__(range(len(sampler)), num_shards, index, shuffle=False)
        self.original = sampler

    def __iter__(self) -> Iterator:
        # The ranks' own random states can differ.
        with seed.same_seed(seed.data_seed() + self.epoch):
            order = list(self.original)
        return (order[place] for place in super().__iter__())


class EveryNthBatch(Sampler):
    """One shard of a sampler's batches: the batches index, index + num_shards, …"""

    def __init__(self, batches: Any, num_shards: int, index: int):
        self.batches = batches
        self.num_shards = num_shards
        self.index = index

    def __iter__(self) -> Iterator:
        # The user's random sampler must give the same batches on all ranks.
        with seed.same_seed(seed.data_seed()):
            batches = list(self.batches)
        yield from batches[self.index :: self.num_shards]

    def __len__(self) -> int:
        return len(range(self.index, len(self.batches), self.num_shards))


def prepare_for_rank(
    settings: Settings, strategy: Strategy, loader: Any, training: bool
) -> Any:
    """Return this rank's shard of a dataloader, or the loader itself; seed its workers."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UserError(
            f"a dataloader is {type(loader).__name__}: expected a DataLoader, or another "
            f"iterable of batches; a list holds several dataloaders."
        )
    if settings.use_distributed_sampler:
        loader = shard_loader(loader, strategy.shard, training)
    seed.seed_workers(loader, strategy.world.rank)
    return loader


def shard_loader(loader: Any, shard: tuple[int, int], training: bool) -> Any:
    """Return a copy of the DataLoader that gives one shard of the data.

    shard   (number of shards, index of this one)

    A loader that is not a DataLoader, or whose data set is an IterableDataset, is returned
    unchanged: the user must shard it. Raises UserError for a batch sampler that cannot be
    sharded.
    """
    num_shards, index = shard
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    shuffled = isinstance(loader.sampler, RandomSampler)
    if num_shards == 1 or isinstance(loader.sampler, DistributedSampler):
        return loader
    if not training:
        return _shard_by_batch(loader, num_shards, index, shuffled)
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise UserError(
            f"a DataLoader with the batch_sampler {type(loader.batch_sampler).__name__} "
            f"cannot be sharded over {num_shards} ranks: shard it yourself, and give "
            f"Trainer(use_distributed_sampler=False)."
        )
    in_order = isinstance(loader.sampler, SequentialSampler)
    if in_order or (shuffled and _draws_each_once(loader)):
        sampler = DistributedSampler(
            loader.dataset,
            num_shards,
            index,
            shuffle=shuffled,
            seed=seed.data_seed(),
        )
        return _with_sampler(loader, sampler)
    return _with_sampler(loader, ShardedSampler(loader.sampler, num_shards, index))


def _shard_by_batch(
    loader: DataLoader, num_shards: int, index: int, shuffled: bool
) -> DataLoader:
    """Return a copy of the loader that gives every num_shards-th batch.

    A loader that shuffles is read in order, because each rank would shuffle differently.
    """
    if shuffled:
        loader = _with_sampler(loader, SequentialSampler(loader.dataset))
    batches = num_batches(loader)
    if batches == float("inf"):
        raise UserError(
            f"a DataLoader whose batch_sampler has no length cannot be sharded over "
            f"{num_shards} ranks: give the sampler a __len__, or shard the data yourself, and "
            f"give Trainer(use_distributed_sampler=False)."
        )
    if batches < num_shards and is_rank_zero():
        warnings.warn(
            f"{pluralize(int(batches), 'batch')} to evaluate for {num_shards} ranks, so some "
            f"ranks get none: give a smaller batch_size.",
            stacklevel=2,
        )
    # With batch_size=None the sampler itself gives whole batches.
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return _with_sampler(loader, None, EveryNthBatch(sampler, num_shards, index))


def _draws_each_once(loader: DataLoader) -> bool:
    """Whether the loader's RandomSampler draws each row exactly once (shuffle=True does)."""
    return not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)


def _with_sampler(loader: DataLoader, sampler: Any, batches: Any = None) -> DataLoader:
    """Return a copy of the loader, of the same class, with another sampler or another batch
    sampler.

    A loader with batch_size=None uses its sampler as the batch sampler.
    """
    changed = copy.copy(loader)
    if loader.batch_sampler is None:
        sampler = sampler if batches is None else batches
        batches = None
    elif batches is None:
        batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    # Set in __dict__, because DataLoader.__setattr__ raises an error for these names.
    changed.__dict__.update(batch_sampler=batches, _iterator=None)
    if sampler is not None:
        changed.__dict__["sampler"] = sampler
    return changed


def start_epoch(loader: Any, epoch: int) -> None:
    """Call set_epoch on the loader's samplers that have this method."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def num_batches(loader: Any) -> float:
    """The number of batches of the loader; infinity if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def limit_batches(settings: Settings, batches: float, name: str) -> float:
    """Limit `batches` by limit_<name>_batches: a number, or a fraction (1.0 is all)."""
    limit = getattr(settings, f"limit_{name}_batches")
    overfits = settings.overfit_batches and name in ("train", "val")
    name = "overfit_batches" if overfits else f"limit_{name}_batches"
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return batches
    if isinstance(limit, float):
        if batches == float("inf"):
            raise UserError(
                f"{name}={limit} is a fraction, but the dataloader has no length: give a "
                f"number of batches."
            )
        if limit and batches and batches * limit < 1:
            raise UserError(
                f"{name}={limit} of {batches} batches is less than one: give a number of "
                f"batches."
            )
        return int(batches * limit)
    return min(batches, limit)


def as_list(loaders: Any) -> list:
    """Return one loader, or a list or dict of loaders, as a list; the keys have no effect."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def one_loader(loader: Any) -> Any:
    """Return the training dataloader. Raises UserError for a list or dict of several."""
    if isinstance(loader, (list, tuple, Mapping)):
        refuse("CombinedLoader", f"trainer.fit with a {type(loader).__name__} of dataloaders")
    return loader
