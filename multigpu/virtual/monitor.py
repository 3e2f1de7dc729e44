"""What NVML and nvidia-smi know of a run's GPUs, in any of its processes.

It is read from the run's options and the folder of its records, so a process needs no torch.
A process that has virtual GPUs asks them: only it knows its memory of this moment.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from multigpu.errors import UserError
from multigpu.virtual import shared_memory
from multigpu.virtual.options import from_environment
from multigpu.virtual.record import VARIABLE
from multigpu.virtual.sim.presets import Gpu

if TYPE_CHECKING:
    from multigpu.virtual.sim.machine import Machine
    from multigpu.virtual.sim.memory import Meter

# The versions that NVML and nvidia-smi report. 570.26 is the first driver for CUDA 12.8:
# NVIDIA, "CUDA 12.8 Release Notes", table "CUDA Toolkit and Corresponding Driver Versions".
DRIVER = "570.26"
CUDA = (12, 8)


class Status(NamedTuple):
    """A GPU now.

    number       its number on the machine, whatever CUDA_VISIBLE_DEVICES says
    capacity     its memory in bytes
    processes    the number of each process that occupies memory, and its bytes
    utilization  the percentage of the simulated time so far in which it computed
    """

    number: int
    model: Gpu
    capacity: int
    processes: list[tuple[int, int]]
    utilization: int

    @property
    def name(self) -> str:
        """Its name, as torch.cuda.get_device_name gives it."""
        return f"{self.model.name} (virtual)"

    @property
    def used(self) -> int:
        """The bytes that processes occupy."""
        return sum(nbytes for _, nbytes in self.processes)


def statuses() -> list[Status]:
    """The GPUs of this machine. Raises UserError outside of a run on virtual GPUs."""
    machine, options = _machine(), from_environment()
    meters = {meter.number: meter for meter in machine.meters} if machine else {}
    if options is None:
        if not meters:
            raise UserError("no virtual GPUs are running: start with `multigpu virtual`.")
        return [_status_of(meter) for meter in meters.values()]
    # `multigpu prove` keeps no records.
    folder = Path(os.environ.get(VARIABLE, os.devnull))
    return [
        _status_of(meters[number])
        if number in meters
        else _from_records(folder, number, model, options.memory or model.memory)
        for number, model in enumerate(options.models())
    ]


def _machine() -> "Machine | None":
    """The virtual GPUs of this process, if it has some."""
    module = sys.modules.get("multigpu.virtual.sim.machine")
    machine = module and module.running()
    return machine if machine and machine.process == os.getpid() else None


def _status_of(meter: "Meter") -> Status:
    """The status of a GPU of this process."""
    # Not imported above: it imports torch.
    from multigpu.virtual import recorder

    clock = meter.machine.clock
    if record := recorder.current():
        # It removes events from the clock.
        computed = record.computed(meter.index)
    else:
        computed = sum(
            event.end - event.start
            for event in clock.events()
            if event.device == meter.index and event.kind == "compute"
        )
    processes = [(pid, nbytes) for pid, nbytes in meter.processes() if nbytes]
    busy = _percentage(computed, clock.reached())
    return Status(meter.number, meter.gpu, meter.capacity, processes, busy)


def _from_records(folder: Path, number: int, model: Gpu, capacity: int) -> Status:
    """The status of a GPU by the records of the run's processes in `folder`."""
    path = shared_memory.table_path(folder, number)
    # A table that is opened is made.
    processes = sorted(_shared_memory(path, capacity).others()) if path.exists() else []
    living = {pid for pid, _ in processes}
    computed = until = 0.0
    for path in folder.glob("*.json"):
        summary = json.loads(path.read_text())
        for device in summary["devices"] if summary["pid"] in living else ():
            if (device["machine"], device["number"]) == (shared_memory.machine(), number):
                computed += device["compute"]
                until = max(until, summary["seconds"])
    return Status(number, model, capacity, processes, _percentage(computed, until))


@cache
def _shared_memory(path: Path, capacity: int) -> shared_memory.SharedMemory:
    """The memory of a GPU that this process only looks at: its table is opened once."""
    return shared_memory.SharedMemory(path, capacity)


def _percentage(seconds: float, until: float) -> int:
    return min(100, round(100 * seconds / until)) if until else 0
