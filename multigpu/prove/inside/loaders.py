"""The program's DataLoaders: epochs, larger batches, the order of another sampler."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, dataloader

from multigpu.prove.inside.replacing import replace
from multigpu.prove.record import Loader
from multigpu.prove.settings import Order


class Reading:
    """A DataLoader: how many times its iteration has begun, and how many batches
    training read from it.
    """

    def __init__(self, loader: DataLoader):
        self.begun = 0
        self.batches_read = 0
        self.epochs = 0
        self.of_last_step = 0
        sampler = getattr(loader, "sampler", None)
        random_order = type(sampler).__name__ in ("RandomSampler", "SeedableRandomSampler")
        self.facts = Loader(
            sampler=type(sampler).__name__,
            shuffle=bool(getattr(sampler, "shuffle", random_order)),
            rows=_length(loader.dataset),
            batches=_length(loader),
            seed=getattr(sampler, "seed", 0),
        )

    def begin(self, loader: DataLoader, order: Order | None) -> None:
        """An iteration begins; in `order`, if it is one of this loader's rows."""
        self.begun += 1
        self.facts.set_epoch = getattr(getattr(loader, "sampler", None), "epoch", 0)
        batches = getattr(loader, "batch_sampler", None)
        ordered = order and (order.sampler, order.rows) == (
            self.facts.sampler,
            self.facts.rows,
        )
        if not ordered or not isinstance(batches, BatchSampler):
            return
        sampler = DistributedSampler(
            loader.dataset, 1, 0, shuffle=order.shuffle, seed=order.seed
        )
        later = max(0, self.epochs - len(order.epochs) + 1)
        sampler.set_epoch(order.epochs[min(self.epochs, len(order.epochs) - 1)] + later)
        batches.sampler = sampler

    def epoch_of_step(self) -> int:
        """The epoch of a step that is made now, from 1; iterations without steps are none."""
        if self.begun != self.of_last_step:
            self.epochs += 1
            self.of_last_step = self.begun
        return self.epochs

    def steps_per_epoch(self, steps: int) -> float | None:
        """The steps of an epoch, from the batches that `steps` steps took."""
        batches = self.facts.batches
        return batches * steps / self.batches_read if batches and self.batches_read else None


def _length(obj: Any) -> int | None:
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(obj)
    return None


class _Enlarged(int):
    """A batch size that has been enlarged: Lightning makes loaders anew from their own."""

    @classmethod
    def of(cls, batch_size: int, times: int) -> int:
        """The enlarged batch size."""
        if times == 1 or isinstance(batch_size, cls):
            return batch_size
        return cls(batch_size * times)


def wrap_loaders(recorder: Any, times: int, order: Order | None) -> None:
    known: weakref.WeakKeyDictionary[DataLoader, Reading] = weakref.WeakKeyDictionary()

    def make_init(original: Callable) -> Callable:
        def __init__(
            self: DataLoader,
            dataset: Any,
            batch_size: int | None = 1,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            sampler = kwargs.get("batch_sampler", args[2] if len(args) > 2 else None)
            if isinstance(sampler, BatchSampler):
                sampler.batch_size = _Enlarged.of(sampler.batch_size, times)
            elif batch_size is not None and sampler is None:
                batch_size = _Enlarged.of(batch_size, times)
            original(self, dataset, batch_size, *args, **kwargs)

        return __init__

    def make_iter(original: Callable) -> Callable:
        def __iter__(self: DataLoader) -> Any:
            if self not in known:
                known[self] = Reading(self)
            known[self].begin(self, order)
            iterator = original(self)
            with suppress(AttributeError):
                iterator._prove_reading = known[self]
            return iterator

        return __iter__

    def make_next(original: Callable) -> Callable:
        def __next__(self: Any) -> Any:
            batch = original(self)
            loader = getattr(self, "_prove_reading", None)
            if loader is not None:
                recorder.read(loader)
            return batch

        return __next__

    replace(DataLoader, "__init__", make_init)
    replace(DataLoader, "__iter__", make_iter)
    replace(dataloader._BaseDataLoaderIter, "__next__", make_next)
