"""Notes on the clock's events: which micro-batch is computed, what a transfer carries.

A mark is a text for the operations that follow it, as NVTX's ranges are in NVIDIA's profiler.
The clock logs the operations of a thread in the order in which the program calls them, and on
virtual GPUs backward runs in the thread that calls it. So a mark belongs to the right
operations in forward and in backward. DataParallel's replicas run in threads of their own at
the same time: do not mark them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from multigpu.vgpu.sim.clock import Clock, Event


def mark(clock: Clock, text: str) -> None:
    """Give the events from now on the note `text`, until the next mark; "" ends a mark."""
    clock.marks.append((_num_events(clock), text))


@contextmanager
def marked(clock: Clock, text: str) -> Iterator[None]:
    """Give the events of a `with` block the note `text`; afterwards the old mark continues."""
    _, before = clock.marks[-1]
    mark(clock, text)
    try:
        yield
    finally:
        mark(clock, before)


@contextmanager
def carrying(clock: Clock, contents: str) -> Iterator[None]:
    """Name what this thread's transfers in a `with` block carry, such as "weights"."""
    before = getattr(clock.local, "contents", "")
    clock.local.contents = contents
    try:
        yield
    finally:
        clock.local.contents = before


def note_transfer(clock: Clock, contents: str) -> None:
    """Note what the transfer carries that was logged last.

    `carrying` has precedence, except in backward, where all transfers carry gradients.
    """
    if clock.phase() == "backward":
        contents = "gradients"
    else:
        contents = getattr(clock.local, "contents", "") or contents
    clock.contents[_num_events(clock) - 1] = contents


def notes_by_event(clock: Clock) -> dict[Event, str]:
    """The note of each event that has one: of a transfer its contents, else the mark."""
    events = clock.events()
    notes = {}
    ends = [number for number, _ in clock.marks[1:]] + [len(events)]
    for (start, text), end in zip(clock.marks, ends, strict=True):
        if text:
            notes |= {event: text for event in events[start:end] if event.kind == "compute"}
    notes |= {events[number]: text for number, text in clock.contents.items()}
    return notes


def _num_events(clock: Clock) -> int:
    return len(clock.log) // len(Event._fields)
