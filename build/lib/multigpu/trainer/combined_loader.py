"""CombinedLoader: several dataloaders that are read as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

from multigpu.errors import UserError, did_you_mean

END = object()
# What cannot be a dataloader.
PRIMITIVES = (bool, int, float, complex, str, bytes)


class CombinedLoader(Iterable):
    """Give (batch, batch index, loader index) from a list, tuple or dict of dataloaders.

    iterables   the dataloaders, also nested; a batch has the same structure. A list of
                numbers or texts is one dataloader, with these as its batches
    mode        "min_size": until the shortest ends; "max_size": until the longest ends, None
                in place of what has ended; "max_size_cycle": until the longest ends, the
                others begin again; "sequential": one after the other, a batch is one loader's

    The Trainer reads several training dataloaders with "max_size_cycle", and several
    validation dataloaders with "sequential". Raises UserError for another mode.
    """

    def __init__(self, iterables: Any, mode: str = "min_size"):
        if mode not in MODES:
            hint = did_you_mean(mode, MODES) or f"expected one of {', '.join(MODES)}."
            raise UserError(f"CombinedLoader(mode={mode!r}): {hint}")
        self.iterables = iterables
        self.mode = mode
        self._limits: list[float] | None = None

    @property
    def flattened(self) -> list[Any]:
        """The dataloaders as a list."""
        return list(leaves(self.iterables))

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        number = len(self.flattened)
        if len(loaders) != number:
            raise UserError(f"CombinedLoader has {number} dataloaders, not {len(loaders)}.")
        self.iterables = rebuild(self.iterables, iter(loaders))

    @property
    def limits(self) -> list[float] | None:
        """At most this many batches of each dataloader; None without limits.

        They limit the length, and what "sequential" gives. In other modes, the Trainer stops
        after as many batches as the length.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: float | list[float] | None) -> None:
        number = len(self.flattened)
        if isinstance(limits, (int, float)):
            limits = [limits] * number
        if limits is not None and len(limits) != number:
            raise UserError(
                f"CombinedLoader has {number} dataloaders, so it needs {number} limits, "
                f"not {len(limits)}."
            )
        self._limits = limits

    @property
    def sampler(self) -> Any:
        """The samplers of the dataloaders, in the structure of `iterables`."""
        samplers = (getattr(loader, "sampler", None) for loader in self.flattened)
        return rebuild(self.iterables, samplers)

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the dataloaders, in the structure of `iterables`."""
        samplers = (getattr(loader, "batch_sampler", None) for loader in self.flattened)
        return rebuild(self.iterables, samplers)

    def sized(self) -> float:
        """The number of batches; infinity if a dataloader that decides it has no length."""
        lengths = [_length(loader) for loader in self.flattened]
        if self._limits is not None:
            lengths = list(map(min, lengths, self._limits))
        return MODES[self.mode](lengths) if lengths else 0

    def __len__(self) -> int:
        """The number of batches. Unlike Lightning's, it is known before `iter`."""
        length = self.sized()
        if length == float("inf"):
            raise TypeError("a dataloader of this CombinedLoader has no length")
        return int(length)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """The batches. The workers of the dataloaders that are read first start now."""
        if self.mode == "sequential":
            return self._one_after_the_other()
        rows = {"min_size": self._shortest, "max_size": self._longest}
        together = rows.get(self.mode, self._cycled)(list(map(iter, self.flattened)))
        return (
            (rebuild(self.iterables, iter(row)), index, 0)
            for index, row in zip(count(), together, strict=False)
        )

    def _one_after_the_other(self) -> Iterator[tuple[Any, int, int]]:
        loaders = self.flattened
        limits = [float("inf")] * len(loaders) if self._limits is None else self._limits
        first = next((number for number, limit in enumerate(limits) if limit), None)
        started = {} if first is None else {first: iter(loaders[first])}

        def batches() -> Iterator[tuple[Any, int, int]]:
            for number, (loader, limit) in enumerate(zip(loaders, limits, strict=True)):
                if not limit:
                    continue
                iterator = started.pop(number) if number in started else iter(loader)
                stop = None if limit == float("inf") else int(limit)
                for index, batch in enumerate(islice(iterator, stop)):
                    yield batch, index, number

        return batches()

    def _shortest(self, iterators: list[Iterator]) -> Iterator[list]:
        while iterators:
            row = []
            for iterator in iterators:
                batch = next(iterator, END)
                if batch is END:
                    return
                row.append(batch)
            yield row

    def _longest(self, iterators: list[Iterator]) -> Iterator[list]:
        while True:
            row = [next(iterator, END) for iterator in iterators]
            if all(batch is END for batch in row):
                return
            yield [None if batch is END else batch for batch in row]

    def _cycled(self, iterators: list[Iterator]) -> Iterator[list]:
        loaders = self.flattened
        ended = [False] * len(iterators)
        while iterators:
            row = []
            for number in range(len(iterators)):
                batch = next(iterators[number], END)
                if batch is END:
                    ended[number] = True
                    if all(ended):
                        return
                    iterators[number] = iter(loaders[number])
                    batch = next(iterators[number], None)
                row.append(batch)
            yield row


# Mode → the number of batches, from the numbers of the dataloaders.
MODES: dict[str, Callable[[list[float]], float]] = {
    "min_size": min,
    "max_size_cycle": max,
    "max_size": max,
    "sequential": sum,
}


def combined(loaders: Any) -> Any:
    """Several training dataloaders as a CombinedLoader; one dataloader unchanged.

    Raises UserError for a CombinedLoader with the mode "sequential".
    """
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        raise UserError(
            "trainer.fit does not train with CombinedLoader(mode='sequential'): give another "
            "mode, or concatenate the data sets with torch.utils.data.ConcatDataset."
        )
    if isinstance(loaders, (list, tuple, Mapping)):
        return CombinedLoader(loaders, "max_size_cycle")
    return loaders


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def leaves(structure: Any) -> Iterator[Any]:
    """The dataloaders in nested lists, tuples and dicts."""
    if not _holds_loaders(structure):
        yield structure
        return
    for item in structure.values() if isinstance(structure, Mapping) else structure:
        yield from leaves(item)


def _holds_loaders(structure: Any) -> bool:
    """Whether it is a container of dataloaders; a list of numbers or texts is a dataloader."""
    if isinstance(structure, Mapping):
        return True
    if not isinstance(structure, (list, tuple)):
        return False
    return not structure or not all(isinstance(item, PRIMITIVES) for item in structure)


def rebuild(structure: Any, loaders: Iterator[Any]) -> Any:
    """The structure, with `loaders` in place of its dataloaders, in the order of `leaves`."""
    if not _holds_loaders(structure):
        return next(loaders)
    if isinstance(structure, Mapping):
        return {key: rebuild(item, loaders) for key, item in structure.items()}
    items = [rebuild(item, loaders) for item in structure]
    return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
