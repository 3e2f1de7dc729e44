"""Changes torch temporarily, by the rows of a table, and then restores it.

A row is a Replacement (another value for an attribute) or a Registration (entries that a call
adds to registries). The rows are applied in their order and undone in the reverse order. If a
row fails, the rows before it are undone before the error is raised: torch is never left
half-changed.
"""

from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


def always() -> bool:
    """The condition of a row that applies on every machine."""
    return True


@dataclass(frozen=True)
class Replacement:
    """The attribute `name` of `owner` becomes `make(original)`.

    `owner` is the dotted name of a module or a class. Afterwards the original is restored. If
    the owner inherits the attribute, the replacement is deleted. A value that a program has
    assigned to the attribute in the meantime is lost.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    why: str
    when: Callable[[], bool] = always

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the replacement is in place."""
        owner = resolve_name(self.owner)
        inherited = self.name not in vars(owner)
        # Not getattr alone: for a class method it would return the bound method.
        original = getattr(owner, self.name) if inherited else vars(owner)[self.name]
        setattr(owner, self.name, self.make(original))
        try:
            yield
        finally:
            if not inherited:
                setattr(owner, self.name, original)
            elif self.name in vars(owner):
                delattr(owner, self.name)


@dataclass(frozen=True)
class Registration:
    """`register()` adds entries to `registries`; these entries are removed afterwards.

    `registries` are the dotted names of lists, dicts and classes. Entries that a program adds
    in the meantime stay.
    """

    registries: tuple[str, ...]
    register: Callable[[], None]
    why: str
    when: Callable[[], bool] = always

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the entries are in place."""
        registries = [resolve_name(name) for name in self.registries]
        before = [_entries(registry) for registry in registries]
        with ExitStack() as undo:
            try:
                self.register()
            finally:
                for registry, old in zip(registries, before, strict=True):
                    new = [entry for entry in _entries(registry) if entry not in old]
                    undo.callback(_remove, registry, new)
            yield


Registry = MutableSequence | MutableMapping | type


def _entries(registry: Registry) -> list:
    """The members of a list, the keys of a dict, the names of a class's attributes."""
    return list(vars(registry) if isinstance(registry, type) else registry)


def _remove(registry: Registry, entries: list) -> None:
    for entry in entries:
        if entry not in _entries(registry):
            continue  # a program has removed it itself
        if isinstance(registry, type):
            delattr(registry, entry)
        elif isinstance(registry, MutableMapping):
            del registry[entry]
        else:
            registry.remove(entry)


class Table:
    """The rows, and which of them are in place."""

    def __init__(self, rows: tuple[Replacement | Registration, ...]):
        self.rows = rows
        self._in_place = ExitStack()

    def apply(self) -> None:
        """Apply each row whose condition holds. If one raises, none stays in place."""
        with ExitStack() as applied:
            for row in self.rows:
                if row.when():
                    applied.enter_context(row.applied())
            self._in_place = applied.pop_all()

    def undo(self) -> None:
        """Undo the rows in the reverse order. Does nothing if none is in place."""
        self._in_place.close()
