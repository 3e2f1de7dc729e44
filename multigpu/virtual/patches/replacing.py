"""Changes torch temporarily, by the rows of a table, and then restores it.

A row is a Replacement (another value for an attribute) or a Setting (another state: of torch's
C++ code, or of a registry). The rows are applied in their order and undone in the reverse
order. If a row fails, the rows before it are undone before the error is raised: torch is never
left half-changed.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
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

    With `optional`, the owner may lack the attribute. Then `original` is None, and the
    replacement is deleted afterwards.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    why: str
    when: Callable[[], bool] = always
    optional: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the replacement is in place."""
        owner = resolve_name(self.owner)
        inherited = self.name not in vars(owner)
        # Not getattr alone: for a class method it would return the bound method.
        if not inherited:
            original = vars(owner)[self.name]
        elif self.optional:
            original = getattr(owner, self.name, None)
        else:
            original = getattr(owner, self.name)
        setattr(owner, self.name, self.make(original))
        try:
            yield
        finally:
            if not inherited:
                setattr(owner, self.name, original)
            elif self.name in vars(owner):
                delattr(owner, self.name)


def rows(
    owners: Iterable[str],
    names: Iterable[str],
    make: Callable[[Any], Any],
    why: str,
    when: Callable[[], bool] = always,
    optional: bool = False,
) -> Iterator[Replacement]:
    """A row for each name of each owner."""
    for owner in owners:
        for name in names:
            yield Replacement(owner, name, make, why, when, optional)


def values(
    owners: Iterable[str],
    by_name: dict[str, Any],
    why: str,
    when: Callable[[], bool] = always,
) -> Iterator[Replacement]:
    """For each owner and each name a row that sets the name's value.

    The rows are optional: not each version and build of torch has all names.
    """
    for name, value in by_name.items():
        yield from rows(owners, [name], lambda original, value=value: value, why, when, True)


@dataclass(frozen=True)
class Setting:
    """`change()` changes a state, and returns a function that restores it.

    `name` says which state it is. In a registry, the entries that a program adds in the
    meantime stay, and those that it removes stay away.
    """

    name: str
    change: Callable[[], Callable[[], None]]
    why: str
    when: Callable[[], bool] = always

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the state is changed."""
        restore = self.change()
        try:
            yield
        finally:
            restore()


Row = Replacement | Setting


def remove(registry: list, entry: Any) -> None:
    """Remove an entry from a list, unless a program has done so."""
    if entry in registry:
        registry.remove(entry)


class Table:
    """The rows, and which of them are in place."""

    def __init__(self, rows: tuple[Row, ...]):
        self.rows = rows
        self._in_place = ExitStack()

    def apply(self) -> None:
        """Apply each row whose condition holds. If one raises, none stays in place."""
        with ExitStack() as applied:
            for row in self.rows:
                if row.when():
                    applied.enter_context(row.applied())
            self._in_place = applied.pop_all()
        # Python's end must not undo the rows: torch's modules can be half gone then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._in_place))

    def undo(self) -> None:
        """Undo the rows in the reverse order. Does nothing if none is in place."""
        self._in_place.close()
