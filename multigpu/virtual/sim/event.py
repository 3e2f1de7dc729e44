"""One unit of work of a device, as the clock logs it and the timeline shows it."""

from typing import NamedTuple

from multigpu.virtual.sim.streams import DEFAULT

# The host's number in a transfer; devices are numbered from 0.
HOST = -1


class Event(NamedTuple):
    """One unit of work of a device; `start` and `end` are in simulated seconds.

    kind is "compute", "transfer" or "collective"; phase is "forward", "backward" or "update"
    (an optimizer's step). A transfer has two ends: `device` is its source, or its destination
    if the source is the host; `peer` is the other end (HOST for the host). For a message
    between ranks `peer` is None. `stream` is the number of the device's stream that launched
    the work. `shape` is that of a computation's result, the first one of several. A kernel can
    pause between its start and its end (streams.py).
    """

    device: int
    kind: str
    phase: str
    name: str
    start: float
    end: float
    peer: int | None = None
    stream: int = DEFAULT
    shape: tuple[int, ...] | None = None
