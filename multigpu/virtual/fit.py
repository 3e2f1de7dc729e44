"""Does a program fit on its GPUs, and what fills their memory?"""

import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from multigpu.virtual.record import Device
from multigpu.virtual.sim.presets import format_bytes

# Bytes of CUDA's context, which is not simulated: 526.8 MiB on an H100 (benchmarks/gpu).
CONTEXT = 527 * 2**20
# A memory below this size was chosen with --memory: no GPU has so little.
LEAST_OF_A_GPU = 2 * 2**30
# The lines of the program that the text names.
SHOWN_LINES = 3
# Columns of a line; a browser breaks a longer one in a notebook.
WIDTH = 95


@dataclass
class Fit:
    """The verdict on a run: `device` is the fullest GPU, `name` its name in the report.

    With `caught` requests that did not fit, the program went on and ended well.
    """

    name: str
    device: Device
    fits: bool
    caught: bool

    @classmethod
    def of(cls, devices: Mapping[str, Device], exit_code: int) -> "Fit":
        """The verdict on the GPUs by their names; `exit_code` is the program's."""
        short = {name: device for name, device in devices.items() if device.shortage}
        if short and exit_code:
            name = max(short, key=lambda name: short[name].shortage["missing"])
            return cls(name, devices[name], fits=False, caught=False)
        name = max(devices, key=lambda name: devices[name].reserved / devices[name].capacity)
        return cls(name, devices[name], fits=True, caught=bool(short))

    def text(self) -> Iterator[str]:
        """Lines for the report."""
        device, shortage = self.device, self.device.shortage
        capacity = format_bytes(device.capacity)
        if self.fits:
            headroom = device.capacity - device.reserved
            verdict = "fits"
            if headroom < CONTEXT and device.capacity >= LEAST_OF_A_GPU:
                verdict = f"fits only without CUDA's context ({format_bytes(CONTEXT)})"
            elif self.caught:
                verdict = "fits, after the program has caught OutOfMemoryError"
            yield _wrapped(
                f"{verdict}: the peak of {self.name} is {format_bytes(device.peak)} "
                f"(reserved: {format_bytes(device.reserved)}) of {capacity}, "
                f"{format_bytes(headroom)} free"
            )
        else:
            yield _wrapped(
                f"does not fit: {format_bytes(shortage['missing'])} were missing on "
                f"{self.name}, which had {format_bytes(shortage['allocated'])} (reserved: "
                f"{format_bytes(shortage['reserved'])}) of {capacity} and was asked for "
                f"{format_bytes(shortage['tried'])}"
            )
        if device.kinds:
            kinds = [f"{kind} {format_bytes(nbytes)}" for kind, nbytes in device.kinds.items()]
            yield _wrapped(f"filled by: {', '.join(kinds)}")
        if device.lines:
            yield "most by line:"
        for file, line, kind, nbytes in device.lines[:SHOWN_LINES]:
            yield f"  {format_bytes(nbytes)} {_place(file)}:{line} ({kind})"

    def as_json(self) -> dict[str, Any]:
        """The verdict as numbers, in bytes."""
        device = self.device
        numbers = {
            "fits": self.fits,
            "gpu": self.name,
            "capacity_bytes": device.capacity,
            "peak_bytes": device.peak,
            "peak_reserved_bytes": device.reserved,
            "headroom_bytes": device.capacity - device.reserved,
            "bytes_by_kind": device.kinds,
        }
        if device.shortage:
            numbers["asked_for_bytes"] = device.shortage["tried"]
            numbers["missing_bytes"] = device.shortage["missing"]
        return numbers


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_long_words=False)


def _place(file: str) -> str:
    """A file's path for people: relative to this folder if it is in it or beside it."""
    relative = os.path.relpath(file)
    return file if relative.count(os.pardir) > 1 else relative
