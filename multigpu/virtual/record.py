"""What a process of a run leaves for the report: two files, whose size has a limit.

NAME.json    a Summary, written anew each time, whole or not at all
NAME.allocations  the LIMIT largest allocations of each GPU, for the memory over time
NAME.events  the first LIMIT events; each write appends a pickle, which is quick to write

A process that is killed leaves what it wrote last.
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

from multigpu.virtual.sim.event import Event

# The environment variable with the folder of the run's records.
VARIABLE = "MULTIGPU_VIRTUAL_RECORDS"
# The events that a process writes for the picture and the trace, about 1 MB.
LIMIT = 20_000


@dataclass
class Device:
    """What a process did on one GPU; times are in simulated seconds.

    number       the GPU's number on the machine, whatever CUDA_VISIBLE_DEVICES says
    shown        its number in the process: 1 for cuda:1
    peak         the most bytes that were allocated at the same time
    capacity     the bytes that it has
    compute, transfer, collective   the seconds in which it did such work
    busy         the seconds in which it did work of any kind
    machine      the name of the machine, which has the GPU (shared_memory.py)
    reserved     the most bytes that CUDA's caching allocator had taken
    shortage     the last request that did not fit, as in contents.Shortage
    kinds, lines   what filled the memory then, or at the peak: bytes of each kind, and
                 (file, line, kind, bytes); empty until the process ends
    """

    number: int
    shown: int
    peak: int
    capacity: int
    compute: float = 0.0
    transfer: float = 0.0
    collective: float = 0.0
    busy: float = 0.0
    machine: str = ""
    reserved: int = 0
    shortage: dict[str, int] | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    lines: list[tuple[str, int, str, int]] = field(default_factory=list)


@dataclass
class Step:
    """What a process had done when its optimizer ended a step; times in simulated seconds.

    Seconds and FLOPs are sums over its GPUs, since its start.

    end          when its GPUs ended their work
    compute      the seconds in which its GPUs computed
    communicate  the seconds in which they copied, or took part in collectives and messages
    busy         the seconds in which they did work of any kind
    flops        the FLOPs of forward passes, by the peak in FLOP/s of the units, as a text
    """

    end: float
    compute: float
    communicate: float
    busy: float
    flops: dict[str, float]


@dataclass
class Summary:
    """What a process did until now.

    rank       its rank, if it is one
    start      of a rank: a text that the ranks of one start of a launcher share
    started    when it started, in seconds of the real clock, to order the processes
    label      the simulated machine: "simulated: 2 × V100-16GB, NVLink2"
    seconds    the simulated time that it has reached
    events     how many events it has logged, those that are not in the file too
    whole_until  the simulated time until which the file has all events; None: all of them
    ended      whether Python's end was reached; False for a process that was killed
    devices    the GPUs that it used
    left_out   what a virtual GPU leaves out and the process asked for, a sentence each
    steps      the optimizer's steps, if the run measures them
    copied     (source, its node, destination, its node, bytes) of copies; source and
               destination are devices' numbers in the process, or HOST
    sent       (rank, own node, the rank's node, bytes) that it sent to other ranks
    standstill  what the watchdog reported before it ended the process; None: it did not
    """

    pid: int
    rank: int | None
    started: float
    label: str
    seconds: float
    start: str = ""
    events: int = 0
    whole_until: float | None = None
    ended: bool = False
    devices: list[Device] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    copied: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    sent: list[tuple[int, int, int, float]] = field(default_factory=list)
    standstill: dict[str, Any] | None = None


# (from, until, bytes, kind) of an allocation, in simulated seconds.
Lifetime = tuple[float, float, int, str]


@dataclass
class Record:
    """A process's Summary, its events with their notes, and its GPUs' allocations.

    `memory` is empty unless the run's report draws the memory over time.
    """

    summary: Summary
    events: list[Event]
    notes: dict[Event, str]
    memory: dict[int, list[Lifetime]] = field(default_factory=dict)

    def move(self, moved: Callable[[float], float]) -> None:
        """Replace each time of the record by `moved(time)`; the GPUs' seconds of work stay."""
        summary = self.summary
        summary.seconds = moved(summary.seconds)
        if summary.whole_until is not None:
            summary.whole_until = moved(summary.whole_until)
        for step in summary.steps:
            step.end = moved(step.end)
        new = {e: e._replace(start=moved(e.start), end=moved(e.end)) for e in self.events}
        self.events = [new[event] for event in self.events]
        self.notes = {new[event]: note for event, note in self.notes.items()}
        for gpu, parts in self.memory.items():
            self.memory[gpu] = [(moved(a), moved(b), *rest) for a, b, *rest in parts]


def write_summary(path: Path, summary: Summary) -> None:
    """Write NAME.json at `path`, so that a reader sees the old text or the new one."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(asdict(summary)))
    os.replace(temporary, path)


def append_events(path: Path, fields: list[Any], notes: dict[int, str]) -> None:
    """Append events to NAME.events: their fields, one event after the other, and notes.

    `notes` are texts by the events' places in the list.
    """
    with open(path, "ab") as file:
        pickle.dump((fields, notes), file)


def write_memory(path: Path, memory: dict[int, list[Lifetime]]) -> None:
    """Write NAME.allocations: the largest of each GPU, by its number in the process."""
    largest = {gpu: nlargest(LIMIT, parts, key=itemgetter(2)) for gpu, parts in memory.items()}
    path.write_bytes(pickle.dumps(largest))


def read_records(folder: Path) -> list[Record]:
    """The records of all processes in the folder.

    The ranks come first: by start, in the order of their first processes, then by rank.
    """
    records = []
    for path in folder.glob("*.json"):
        values = json.loads(path.read_text())
        devices = [Device(**device) for device in values.pop("devices")]
        steps = [Step(**step) for step in values.pop("steps")]
        summary = Summary(devices=devices, steps=steps, **values)
        events, notes = [], {}
        for event, note in _read_events(path.with_suffix(".events")):
            events.append(event)
            if note:
                notes[event] = note
        memory_path = path.with_suffix(".allocations")
        memory = pickle.loads(memory_path.read_bytes()) if memory_path.exists() else {}
        records.append(Record(summary, events, notes, memory))
    first: dict[str, float] = {}
    for record in records:
        start, time = record.summary.start, record.summary.started
        first[start] = min(time, first.get(start, time))

    def place(record: Record) -> tuple[bool, float, int, float]:
        summary = record.summary
        if summary.rank is None:
            return True, 0.0, 0, summary.started
        return False, first[summary.start], summary.rank, summary.started

    return sorted(records, key=place)


def _read_events(path: Path) -> Iterator[tuple[Event, str]]:
    """The events of a file, with their notes; what was not written to its end is left out."""
    if not path.exists():
        return
    size = len(Event._fields)
    with open(path, "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        while True:
            fields, notes = pickle.load(file)
            for start in range(0, len(fields), size):
                event = Event(*fields[start : start + size])
                yield event, notes.get(start // size, "")
