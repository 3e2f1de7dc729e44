"""What fills a device's memory at its peak, and when a request did not fit: by kind and line.

The kinds, of which an allocation has the first that fits:
  parameters       of a module, also while FSDP has them gathered
  gradients        `.grad` of a parameter, when an optimizer steps
  optimizer state  when an optimizer steps
  workspaces       of cuBLAS
  temporaries      made in backward or in an optimizer's step, and none of the above
  activations      what operations made at other times: in forward, and without gradients
  other            inputs, buffers, DDP's buckets, and what else was copied or made empty

`mark` tells the first three apart; without an optimizer of torch.optim nothing calls it until
the program ends, and gradients can count as temporaries.
"""

import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from multigpu.virtual.sim.memory import Allocation

PARAMETERS, GRADIENTS, STATE = MARKED = ("parameters", "gradients", "optimizer state")
WORKSPACES, TEMPORARIES, ACTIVATIONS, OTHER = (
    "workspaces",
    "temporaries",
    "activations",
    "other",
)
# Bytes. Finding the line of an allocation takes microseconds: smaller ones have none.
LEAST_WITH_LINE = 2**20
# Lines of the program that are listed.
MOST_LINES = 10
LIBRARIES = sysconfig.get_paths()
INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen ")

Line = tuple[str, int]
# Whether a file is torch's, this package's or Python's own, by its name.
_is_inside: dict[str, bool] = {}


@dataclass
class Shortage:
    """A request that did not fit, in bytes.

    tried      what the driver was asked for
    missing    what it had too little
    allocated, reserved   what the process had
    born       the number of allocations before it
    """

    tried: int
    missing: int
    allocated: int
    reserved: int
    born: int


class Contents:
    """The allocations of one device that existed at its peak.

    `born` of an allocation is its number among the device's allocations.
    """

    def __init__(self) -> None:
        # The number of the allocation that made the peak.
        self.born = 0
        # (bytes then, allocation) of what existed at the peak and is freed now.
        self.gone: list[tuple[int, Allocation]] = []
        # Bytes that a kernel needed only while it ran, at the peak.
        self.brief = 0
        # The last request that did not fit, and what existed then.
        self.shortage: Shortage | None = None
        self.full: list[tuple[int, Allocation]] = []
        # (from, until, bytes, kind) of what is freed, in simulated seconds; None: not kept.
        self.history: list[tuple[float, float, int, str]] | None = None

    def new_peak(self, born: int) -> None:
        """Note that the allocation with this number has made a new peak."""
        self.born = born
        self.brief = 0
        if self.gone:
            self.gone = []

    def add_brief(self, born: int, nbytes: int) -> None:
        """Note `nbytes` that a kernel had only while it ran; `born` is their number."""
        if born == self.born:
            self.brief = nbytes

    def forget(self, allocation: "Allocation") -> None:
        """Keep an allocation of the peak, with its size, before it is freed or resized."""
        self.gone.append((allocation.nbytes, allocation))

    def at_peak(self, living: "Iterable[Allocation]") -> "list[tuple[int, Allocation | None]]":
        """(bytes, allocation) of what existed at the peak; `living` exist now."""
        existing = [allocation for allocation in living if allocation.born <= self.born]
        now = [(allocation.nbytes, allocation) for allocation in existing]
        return [*now, *self.gone, *([(self.brief, None)] if self.brief else [])]


def by_kind(parts: "Iterable[tuple[int, Allocation | None]]") -> dict[str, int]:
    """Bytes of each kind, the largest first."""
    kinds: Counter[str] = Counter()
    for nbytes, allocation in parts:
        kinds[TEMPORARIES if allocation is None else allocation.kind] += nbytes
    largest_first = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return {kind: nbytes for kind, nbytes in largest_first if nbytes}


def by_line(parts: "Iterable[tuple[int, Allocation | None]]") -> list[list[Any]]:
    """[file, line, kind, bytes] of the lines that allocated the most, the largest first."""
    lines: Counter[tuple[str, int, str]] = Counter()
    for nbytes, allocation in parts:
        if allocation is not None and allocation.line is not None:
            lines[(*allocation.line, allocation.kind)] += nbytes
    largest_first = sorted(lines.items(), key=lambda item: (-item[1], item[0]))
    return [[*line, nbytes] for line, nbytes in largest_first[:MOST_LINES]]


def program_line(frame: FrameType | None, skip: tuple[str, ...] = ()) -> Line | None:
    """The innermost line outside of torch, of this package and of Python's library.

    The search begins at `frame`, and leaves out the files below the folders `skip`.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        inside = _is_inside.get(name)
        if inside is None:
            inside = _is_inside[name] = _belongs_inside(name)
        if not inside and not name.startswith(skip):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def _belongs_inside(name: str) -> bool:
    if name.startswith(INSIDE):
        return True
    in_library = name.startswith((LIBRARIES["stdlib"], LIBRARIES["platstdlib"]))
    in_packages = name.startswith((LIBRARIES["purelib"], LIBRARIES["platlib"]))
    return in_library and not in_packages
