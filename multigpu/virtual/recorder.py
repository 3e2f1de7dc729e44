"""Writes this process's record as it goes, so that also a killed process leaves one.

A thread takes the events from the clock several times a second: the memory that they need
stays bounded, however long the program runs. See record.py for the files.
"""

import atexit
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np

from multigpu.virtual import kinds
from multigpu.virtual.busy import Busy
from multigpu.virtual.left_out import notes as left_out
from multigpu.virtual.patches import standstill
from multigpu.virtual.record import (
    LIMIT,
    VARIABLE,
    Device,
    Step,
    Summary,
    append_events,
    write_memory,
    write_summary,
)
from multigpu.virtual.shared_memory import machine as machine_name
from multigpu.virtual.sim import machine as _machine
from multigpu.virtual.sim.clock import Clock
from multigpu.virtual.sim.contents import by_kind, by_line
from multigpu.virtual.sim.event import HOST, Event
from multigpu.virtual.sim.flops import CountingCosts
from multigpu.virtual.sim.machine import Machine
from multigpu.virtual.sim.memory import Meter
from multigpu.virtual.sim.notes import take_events

# Seconds between two writes.
INTERVAL = 0.2
# The last steps that are kept; each write of the record writes them.
MOST_STEPS = 1000
KINDS = ("compute", "transfer", "collective")
# Variables that are equal in all ranks of one start: Slurm's, torchrun's, Open MPI's.
OF_A_START = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "MASTER_PORT",
)


class Recorder:
    """The record of this process in `folder`, and the thread that writes it.

    `visible` are the numbers of the GPUs that the process sees as cuda:0, cuda:1, …
    """

    def __init__(self, folder: Path, visible: list[int]):
        self.folder = folder
        self.visible = visible
        # A program that calls os.execv keeps its process number.
        name = f"{os.getpid()}-{time.time_ns()}"
        self.summary_path = folder / f"{name}.json"
        self.events_path = folder / f"{name}.events"
        self.started = time.time()
        self.rank: int | None = None
        self.start = ""
        self.num_events = 0
        self.num_written = 0
        self.whole_until: float | None = None
        self.steps: list[Step] = []
        self.standstill: dict[str, Any] | None = None
        self.busy: dict[tuple[int, str], Busy] = defaultdict(Busy)
        self.writing = threading.Lock()
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._write_often, daemon=True, name="record")
        self.thread.start()

    def finish(self) -> None:
        """Write the record for the last time, at Python's end."""
        self.ending.set()
        kinds.mark_at_the_end()
        # OSError: the command has ended before this process, and removed the folder.
        with suppress(OSError):
            self.write(ended=True)

    def write(self, ended: bool = False) -> None:
        """Take the clock's events, and write what this process did until now."""
        machine = _machine.running()
        if machine is None or machine.process != os.getpid():
            return
        clock = machine.clock
        with self.writing:
            self._take(machine)
            self._learn_rank()
            devices = self._devices(machine)
            if ended:
                for device in devices:
                    _add_contents(device, machine.meters[device.shown])
                self._write_memory(machine, devices)
            if not devices and not left_out:
                return
            summary = Summary(
                pid=os.getpid(),
                rank=self.rank,
                start=self.start,
                started=self.started,
                label=machine.label(),
                seconds=clock.reached(),
                events=self.num_events,
                whole_until=self.whole_until,
                ended=ended,
                devices=devices,
                left_out=list(left_out),
                steps=self.steps,
                copied=_copied(clock),
                sent=[(*key, nbytes) for key, nbytes in tuple(clock.sent.items())],
                standstill=self.standstill,
            )
            write_summary(self.summary_path, summary)

    def note_standstill(self, report: dict[str, Any]) -> None:
        """Write the record of a process that the watchdog ends."""
        self.standstill = report
        with suppress(OSError):
            self.write()

    def end_step(self) -> None:
        """Note that the program's optimizer has ended a step."""
        machine = _machine.current()
        with self.writing:
            self._take(machine)
            devices = self._devices(machine)
            costs = {machine.meters[device.shown].costs for device in devices}
            flops: dict[str, float] = defaultdict(float)
            # Different GPUs have no common peak to compare with.
            if len(costs) == 1 and isinstance(counting := costs.pop(), CountingCosts):
                for (phase, peak), count in counting.flops.items():
                    if phase == "forward":
                        flops[str(peak)] += count
            step = Step(
                end=max(machine.clock.busy_until(device.shown) for device in devices),
                compute=sum(device.compute for device in devices),
                communicate=sum(device.transfer + device.collective for device in devices),
                busy=sum(device.busy for device in devices),
                flops=dict(flops),
            )
            self.steps = [*self.steps[1 - MOST_STEPS :], step]

    def computed(self, device: int) -> float:
        """The seconds in which a device computed until now."""
        with self.writing:
            self._take(_machine.current())
            return self.busy[device, "compute"].seconds

    def _write_often(self) -> None:
        while not self.ending.wait(INTERVAL):
            try:
                self.write()
            except OSError:
                # As in `finish`, or the disk is full.
                return

    def _take(self, machine: Machine) -> None:
        """Take the clock's events: add up their work, and write the first LIMIT of all."""
        fields, notes = take_events(machine.clock)
        if not fields:
            return
        columns = {
            name: fields[place :: len(Event._fields)]
            for place, name in enumerate(Event._fields)
        }
        starts = np.array(columns["start"])
        self._add_work(columns, starts, np.array(columns["end"]))
        room = LIMIT - self.num_written
        if room > 0:
            append_events(self.events_path, fields[: room * len(Event._fields)], notes)
        if len(starts) > room and self.whole_until is None:
            self.whole_until = float(starts[room:].min())
        self.num_written += min(room, len(starts))
        self.num_events += len(starts)

    def _add_work(
        self, columns: dict[str, list[Any]], starts: np.ndarray, ends: np.ndarray
    ) -> None:
        """Add events to their devices' busy times; `starts` and `ends` are in seconds."""
        devices = np.array(columns["device"])
        peers = np.array([-1 if peer is None else peer for peer in columns["peer"]])
        kinds = np.array(list(map(KINDS.index, columns["kind"])))
        # A transfer is work of both its ends.
        peers[kinds != KINDS.index("transfer")] = -1
        for device in {*devices.tolist(), *peers.tolist()} - {-1}:
            of_device = (devices == device) | (peers == device)
            self.busy[device, "busy"].add(starts[of_device], ends[of_device])
            for number, kind in enumerate(KINDS):
                of_kind = of_device & (kinds == number)
                self.busy[device, kind].add(starts[of_kind], ends[of_kind])

    def _devices(self, machine: Machine) -> list[Device]:
        """The GPUs that this process used: those with memory or work, or too little memory."""
        devices = []
        for index, meter in enumerate(machine.meters):
            used = meter.num_allocations or meter.num_ooms or (index, "busy") in self.busy
            if not used:
                continue
            times = {name: self.busy[index, name].seconds for name in (*KINDS, "busy")}
            device = Device(
                number=self.visible[index],
                shown=index,
                peak=meter.highest,
                capacity=meter.capacity,
                machine=machine_name(),
                reserved=meter.highest_reserved,
                **times,
            )
            devices.append(device)
        return devices

    def _write_memory(self, machine: Machine, devices: list[Device]) -> None:
        meters = {device.shown: machine.meters[device.shown] for device in devices}
        histories = {
            number: meter.history()
            for number, meter in meters.items()
            if meter.contents is not None and meter.contents.history is not None
        }
        if histories:
            write_memory(self.summary_path.with_suffix(".allocations"), histories)

    def _learn_rank(self) -> None:
        """Ask torch.distributed, else the launcher's variable; a rank once known is kept."""
        dist = sys.modules.get("torch.distributed")
        is_initialized = getattr(dist, "is_initialized", None)
        # ValueError: the group is just being destroyed.
        with suppress(ValueError):
            if is_initialized is not None and is_initialized():
                self.rank = dist.get_rank()
            elif self.rank is None:
                self.rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
        if self.rank is not None and not self.start:
            self.start = " ".join(os.environ.get(name, "-") for name in OF_A_START)


def _copied(clock: Clock) -> list[tuple[int, int, int, int, int]]:
    """The bytes of copies, as in Summary.copied; the host is on its device's node."""
    copied = []
    for (source, destination), nbytes in tuple(clock.copied.items()):
        node, other_node = (
            clock.nodes[other if end == HOST else end]
            for end, other in ((source, destination), (destination, source))
        )
        copied.append((source, node, destination, other_node, nbytes))
    return copied


def _add_contents(device: Device, meter: Meter) -> None:
    """Add what filled the memory when a request did not fit, else at the peak."""
    contents = meter.contents
    if contents is None:
        return
    if contents.shortage is None:
        parts = contents.at_peak(meter.living())
    else:
        parts = contents.full
        device.shortage = asdict(contents.shortage)
    device.kinds = by_kind(parts)
    device.lines = by_line(parts)


# This process's recorder; None outside of `multigpu virtual`.
_recorder: Recorder | None = None


def current() -> Recorder | None:
    """This process's recorder; None outside of `multigpu virtual`."""
    return _recorder


def start(visible: list[int]) -> None:
    """Record what this process does on virtual GPUs; nothing outside of `multigpu virtual`.

    `visible` are the numbers of the GPUs that it sees as cuda:0, cuda:1, …
    """
    global _recorder
    folder = os.environ.get(VARIABLE)
    if not folder or _recorder is not None:
        return
    _recorder = Recorder(Path(folder), visible)
    standstill.on_end.append(_recorder.note_standstill)
    # A fork has a copy of all locks: none may be held by the thread, which it does not have.
    os.register_at_fork(
        before=lambda: _recorder and _recorder.writing.acquire(),
        after_in_parent=lambda: _recorder and _recorder.writing.release(),
        after_in_child=_start_in_fork,
    )
    atexit.register(_finish)
    _finish_before_os_exit(None)
    # multiprocessing clears its list of functions when a process begins.
    util.register_after_fork(_finish, _finish_before_os_exit)


def _finish() -> None:
    if _recorder is not None:
        _recorder.finish()


def _finish_before_os_exit(_: object) -> None:
    """Let multiprocessing call `_finish`: its forks end with os._exit, without atexit."""
    util.Finalize(None, _finish, exitpriority=-100)


def _start_in_fork() -> None:
    """A fork has no thread of its parent: begin its own record, unless it can use no GPU."""
    global _recorder
    if _recorder is None:
        return
    machine = _machine.running()
    used = machine is not None and machine.in_use()
    _recorder = None if used else Recorder(_recorder.folder, _recorder.visible)
