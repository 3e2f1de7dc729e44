"""Notes on the clock's events: which micro-batch is computed, what a transfer carries.

A mark is a text for the operations that follow it, as NVTX's ranges are in NVIDIA's profiler.
The clock logs the operations of a thread in the order in which the program calls them, and on
virtual GPUs backward runs in the thread that calls it. So a mark belongs to the right
operations in forward and in backward. DataParallel's replicas run in threads of their own at
the same time: do not mark them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multigpu.virtual.sim.clock import Clock
from multigpu.virtual.sim.event import Event


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
    notes = _notes_by_number(clock, clock.num_taken, clock.num_taken + len(events))
    return {events[number - clock.num_taken]: text for number, text in notes.items()}


def take_events(clock: Clock) -> tuple[list[Any], dict[int, str]]:
    """Remove the events logged so far from the clock, so that its memory is bounded.

    Any thread may call this. Returns the events' fields, one event after the other, and notes
    by the events' places in that list.
    """
    fields = len(Event._fields)
    with clock.taking:
        # An event is appended in one step, so the log has no part of one.
        taken = clock.log[:]
        first, count = clock.num_taken, len(taken) // fields
        notes = _notes_by_number(clock, first, first + count)
        del clock.log[: len(taken)]
        clock.num_taken += count
        clock.marks[:-1] = []
        for number in [number for number in tuple(clock.contents) if number < first + count]:
            del clock.contents[number]
    return taken, {number - first: text for number, text in notes.items()}


def _notes_by_number(clock: Clock, first: int, end: int) -> dict[int, str]:
    """The notes of the events with the numbers from `first` to `end - 1`."""
    fields = len(Event._fields)
    kind = Event._fields.index("kind")
    notes = {}
    marks = list(clock.marks)
    ends = [number for number, _ in marks[1:]] + [end]
    for (start, text), stop in zip(marks, ends, strict=True):
        if text:
            for number in range(max(start, first), min(stop, end)):
                if clock.log[(number - first) * fields + kind] == "compute":
                    notes[number] = text
    contents = tuple(clock.contents.items())
    return notes | {number: text for number, text in contents if first <= number < end}


def _num_events(clock: Clock) -> int:
    """The number of events so far, with those that were taken."""
    with clock.taking:
        return clock.num_taken + len(clock.log) // len(Event._fields)
