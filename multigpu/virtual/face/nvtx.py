"""torch.cuda.nvtx: a program's ranges are marks of the simulated timeline (sim/notes.py)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from multigpu.virtual.sim import notes
from multigpu.virtual.sim.machine import current

# For each thread the marks that the open ranges have replaced.
_local = threading.local()


def _replaced_marks() -> list[str]:
    if not hasattr(_local, "marks"):
        _local.marks = []
    return _local.marks


def range_push(msg: str) -> int:
    """Begin a range, and return its depth, from 0: operations get the text `msg`."""
    clock = current().clock
    marks = _replaced_marks()
    marks.append(clock.marks[-1][1])
    notes.mark(clock, msg)
    return len(marks) - 1


def range_pop() -> int:
    """End the innermost range, and return its depth; -2 if there is none, as NVTX."""
    marks = _replaced_marks()
    if not marks:
        return -2
    notes.mark(current().clock, marks.pop())
    return len(marks)


@contextmanager
def range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """A range around a block or a function; `msg` is formatted with the other arguments."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()


def range_start(msg: str) -> int:
    """Begin a range that range_end ends, also in another thread: it marks nothing."""
    return 0


def range_end(range_id: int) -> None:
    """End a range of range_start."""


def mark(msg: str) -> None:
    """Does nothing: the timeline shows operations, and this is a point between two."""
