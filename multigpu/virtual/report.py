"""What a run on virtual GPUs ends with: a table, a picture, a trace, the numbers as JSON."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu.errors import pluralize
from multigpu.files import atomic, write_json
from multigpu.virtual.fit import Fit
from multigpu.virtual.lanes import text_lanes
from multigpu.virtual.options import Options
from multigpu.virtual.prediction import Prediction
from multigpu.virtual.record import Device, Record, read_records
from multigpu.virtual.shared_memory import Shared, read_shared
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.presets import format_bytes
from multigpu.virtual.sim.spans import Span, format_seconds, in_turns, merge_spans, work_spans
from multigpu.virtual.sim.timeline import Timeline
from multigpu.virtual.table import table
from multigpu.virtual.traffic import Flow
from multigpu.virtual.traffic import text as traffic_text
from multigpu.virtual.visible import VARIABLE, visible_gpus

HEADER = ("", "peak memory", "of", "computes", "transfers", "collectives", "idle")


@dataclass
class UsedGpu:
    """A GPU of a machine, and what each process did on it.

    `peak` are the most bytes that its processes had reserved at the same time, and `at_once`
    is the largest number of processes that used it at the same time.
    """

    machine: str
    number: int
    users: list[tuple[Record, Device]]
    peak: int
    at_once: int

    @property
    def is_shared(self) -> bool:
        """Whether several processes used it."""
        return len(self.users) > 1

    @property
    def capacity(self) -> int:
        """Its memory in bytes."""
        return self.users[0][1].capacity


class Report:
    """The records of a run's processes, read from a folder.

    `prediction` has the figures of a step, if the run measures steps and made one. `at_peaks`
    can be set to those of another run, in which kernels reach the data sheet's peaks.
    """

    def __init__(self, folder: Path, options: Options):
        self.options = options
        self.records = read_records(folder)
        self.gpus = self._gpus(read_shared(folder))
        self._take_turns()
        self.seconds = max((record.summary.seconds for record in self.records), default=0.0)
        self.prediction: Prediction | None = None
        self.at_peaks: Prediction | None = None
        if options.measures_steps():
            self.prediction = Prediction.of(self.records, options)

    def text(self, exit_code: int = 0, has_traffic: bool = False) -> str:
        """The report for people: the simulated time, the GPUs, the timeline, what differs.

        `exit_code` is the program's. With `has_traffic` the report has the table of traffic.
        """
        if not any(record.summary.devices for record in self.records):
            used = "No process of this command used a virtual GPU."
            if exit_code:
                used = "The command failed before it used a virtual GPU."
            if not visible_gpus(self.options.gpus):
                used += f" {VARIABLE}={os.environ[VARIABLE]!r} hides all GPUs: unset it."
            return used
        lines = [
            self.options.label(),
            f"simulated time: {format_seconds(self.seconds)}",
            *self._step(),
            *table([HEADER, *self._rows()]),
            *self.fit(exit_code).text(),
            *(traffic_text(self.flows()) if has_traffic else ()),
            *text_lanes(self.timeline_of_step() or self.timeline()),
            "not as on a GPU:",
            *(f"- {remark}" for remark in self.remarks()),
            *self._likely(),
        ]
        return "\n".join(lines)

    def as_json(self, exit_code: int) -> dict[str, Any]:
        """The report as numbers: bytes, and simulated seconds."""
        gpus = [
            {
                "process": number,
                "rank": record.summary.rank,
                "device": f"cuda:{device.shown}",
                "gpu": device.number,
                "peak_bytes": device.peak,
                "peak_reserved_bytes": device.reserved,
                "bytes_by_kind": device.kinds,
                "bytes_by_line": [
                    {"file": file, "line": line, "kind": kind, "bytes": nbytes}
                    for file, line, kind, nbytes in device.lines
                ],
                "capacity_bytes": device.capacity,
                "compute_seconds": device.compute,
                "transfer_seconds": device.transfer,
                "collective_seconds": device.collective,
                "idle_seconds": max(self.seconds - device.busy, 0.0),
            }
            for number, record in enumerate(self.records)
            for device in record.summary.devices
        ]
        numbers = {
            "label": self.options.label(),
            "simulated_seconds": self.seconds,
            "exit_code": exit_code,
            "fit": self.fit(exit_code).as_json() if gpus else None,
            "gpus": gpus,
            "memory": [
                {
                    "machine": gpu.machine,
                    "gpu": gpu.number,
                    "peak_reserved_bytes": gpu.peak,
                    "capacity_bytes": gpu.capacity,
                    "processes": [self.records.index(record) for record, _ in gpu.users],
                }
                for gpu in self.gpus
            ],
            "traffic": [flow._asdict() for flow in self.flows()],
            "not_as_on_a_gpu": self.remarks(),
        }
        if still := [r.summary.standstill for r in self.records if r.summary.standstill]:
            numbers["standstill"] = still
        if self.prediction is not None:
            numbers["step"] = self.prediction.as_json()
        if self.at_peaks is not None:
            numbers["step_at_peaks"] = self.at_peaks.as_json()
        return numbers

    def remarks(self) -> list[str]:
        """What is not as on a GPU in this run, a sentence each."""
        remarks = []
        if self.options.world is not None:
            numbers = ", ".join(f"{rank:,}" for rank in self.options.ranks)
            remarks.append(
                f"Of {self.options.world:,} ranks only {numbers} ran: the others are taken to "
                f"do the same at the same time, so no rank waits for a slower one."
            )
        if self.options.shapes_only:
            remarks.append(
                "Tensors have shapes but no numbers (--shapes-only): what the program prints "
                "of them is unknown or nan, and what it saves of them has no numbers."
            )
        else:
            remarks.append("The CPU computes the numbers.")
        if self.options.clock == "real":
            remarks.append(
                "torch.cuda.Event has simulated times. Other times that the program prints "
                "are this machine's; with --clock simulated they are simulated, too."
            )
        if taking_turns := [gpu for gpu in self.gpus if self._takes_turns(gpu)]:
            names = ", ".join(map(self._name, taking_turns))
            remarks.append(
                f"{names} computed for several processes in turns, as without MPS: the times "
                f"of this report have the turns, and those that the program asks for "
                f"(torch.cuda.Event, --clock simulated) are of a GPU of its own."
            )
        for record in self.records:
            remarks += [text for text in record.summary.left_out if text not in remarks]
        if self.options.slow_rank is not None:
            rank, _, factor = self.options.slow_rank.partition(":")
            remarks.append(f"Rank {rank} takes {factor} times as long (--slow-rank).")
        still = [self._process(record) for record in self.records if record.summary.standstill]
        if still:
            remarks.append(
                f"{', '.join(still)} stood still and was ended, as NCCL's watchdog ends it: "
                f"above is what it waited for."
            )
        killed = [
            self._process(record)
            for record in self.records
            if not record.summary.ended and not record.summary.standstill
        ]
        if killed:
            remarks.append(
                f"{', '.join(killed)} ended without Python's end, by a signal or os._exit: "
                f"the last moments can be missing here."
            )
        return remarks

    def timeline(self) -> Timeline:
        """The events of all processes, with a lane for each GPU of each process."""
        lanes = [self._lane(record, device) for record, device in self._devices()]
        events: list[Event] = []
        notes: dict[Event, str] = {}
        first = 0
        for record in self.records:
            devices = record.summary.devices
            places = {device.shown: first + i for i, device in enumerate(devices)}
            first += len(devices)
            for event in record.events:
                if event.device not in places:
                    continue
                peer = places.get(event.peer, event.peer)
                moved = event._replace(device=places[event.device], peer=peer)
                events.append(moved)
                if event in record.notes:
                    notes[moved] = record.notes[event]
        until = self.whole_until()
        end = self.seconds if until is None else until
        return Timeline(events, lanes, 0.0, end, self.options.label(), notes)

    def page(self, path: Path, command: str, exit_code: int) -> Path:
        """Write the report as one HTML file."""
        from multigpu.virtual import page

        devices = {self._lane(record, device): device for record, device in self._devices()}
        memory = {
            self._lane(record, device): record.memory.get(device.shown, [])
            for record, device in self._devices()
        }
        capacities = {lane: device.capacity for lane, device in devices.items()}
        text = self.text(exit_code)
        with atomic(path) as file:
            document = page.html(command, text, self.timeline(), memory, capacities)
            file.write_text(document, encoding="utf-8")
        return path

    def whole_until(self) -> float | None:
        """The simulated time until which all events are known; None: all of them are."""
        cuts = [record.summary.whole_until for record in self.records]
        return min((cut for cut in cuts if cut is not None), default=None)

    def timeline_of_step(self) -> Timeline | None:
        """The events of the step that `prediction` describes; None if they are not known."""
        if self.prediction is None:
            return None
        step, until = self.prediction.slowest, self.whole_until()
        if until is not None and step.end > until:
            return None
        run = self.timeline()
        return Timeline(run.events, run.lanes, step.start, step.end, run.label, run.notes)

    def flows(self) -> list[Flow]:
        """The bytes of each pair of ranks, of GPUs of a process, and of a GPU and the host."""
        names = {
            (record.summary.start, record.summary.rank): self._process(record)
            for record in self.records
        }
        flows: Counter[tuple[str, str, int, int]] = Counter()
        for record in self.records:
            devices = record.summary.devices
            lanes = {device.shown: self._lane(record, device) for device in devices}
            for source, node, destination, other_node, nbytes in record.summary.copied:
                ends = lanes.get(source, "host"), lanes.get(destination, "host")
                flows[*ends, node, other_node] += nbytes
            for rank, node, other_node, nbytes in record.summary.sent:
                # A rank of a --world that does not run has no record.
                other = names.get((record.summary.start, rank), f"rank {rank}")
                flows[self._process(record), other, node, other_node] += round(nbytes)
        return [Flow(*place, nbytes) for place, nbytes in flows.items()]

    def fit(self, exit_code: int) -> Fit:
        """Whether the program fits, by the GPU that is, or was, the fullest."""
        devices = {self._lane(record, device): device for record, device in self._devices()}
        return Fit.of(devices, exit_code)

    def _step(self) -> Iterator[str]:
        """The figures of a step, as a range if there is a run at the data sheet's peaks."""
        if self.prediction is None:
            if self.options.measures_steps():
                yield "no step: no optimizer of torch.optim made a step."
            return
        columns = [self.prediction]
        rows: list[tuple[str, ...]] = []
        if self.at_peaks is not None:
            columns.insert(0, self.at_peaks)
            rows.append(("a step", "at data-sheet peaks", "at sourced efficiencies"))

        def add(name: str, text: Callable[[Prediction], str]) -> None:
            rows.append((name, *(text(column) for column in columns)))

        add("step time", lambda column: format_seconds(column.slowest.seconds))
        for unit in ("samples", "tokens"):
            per_step = getattr(self.options, f"{unit}_per_step")
            if per_step is not None:
                add(f"{unit}/s", lambda column, n=per_step: f"{column.per_second(n):,.0f}")
        if peak := self.prediction.slowest.peak:
            add(
                f"MFU, of {peak / 1e12:,.0f} TFLOP/s",
                lambda column: f"{column.slowest.mfu:.1%}",
            )
        add("computing", lambda column: format_seconds(column.slowest.compute))
        add("communicating", lambda column: format_seconds(column.slowest.communicate))
        add("not hidden by computing", lambda column: format_seconds(column.slowest.exposed))
        yield from table(rows)
        count = self.prediction.slowest.count
        if len(self.records[0].summary.steps) == 1:
            yield "the only step, with the program's start: let it make more (--steps 3)"
        else:
            yield f"the median of {pluralize(count, 'step')}, without the first"

    def _likely(self) -> Iterator[str]:
        """Why the run stood still: the ranks say it, too, but above torchrun's traceback."""
        standstills = (record.summary.standstill for record in self.records)
        likely = (standstill["likely"] for standstill in standstills if standstill)
        for cause in filter(None, dict.fromkeys(likely)):
            yield f"likely cause of the standstill: {cause}"

    def _devices(self) -> Iterator[tuple[Record, Device]]:
        for record in self.records:
            for device in record.summary.devices:
                yield record, device

    def _gpus(self, shared: dict[tuple[str, int], Shared]) -> list[UsedGpu]:
        """The GPUs, in the order in which the records name them."""
        users: dict[tuple[str, int], list[tuple[Record, Device]]] = {}
        for record, device in self._devices():
            users.setdefault((device.machine, device.number), []).append((record, device))
        gpus = []
        for place, used in users.items():
            peak, at_once = max(max(device.peak, device.reserved) for _, device in used), 1
            if len(used) > 1 and place in shared:
                peak, at_once = shared[place].peak, shared[place].most_processes
            gpus.append(UsedGpu(*place, used, peak, at_once))
        return gpus

    def _takes_turns(self, gpu: UsedGpu) -> bool:
        """Whether several processes computed on the GPU that had memory there together."""
        return gpu.at_once > 1 and sum(device.compute > 0 for _, device in gpu.users) > 1

    def _take_turns(self) -> None:
        """Let processes that compute on one GPU at the same time take longer in the records.

        Each process's clock counts as if it had its GPUs alone; here all of them begin at 0.
        A wait for another process takes as long as before.
        """
        works: dict[int, dict[Hashable, list[Span]]] = defaultdict(dict)
        for gpu in filter(self._takes_turns, self.gpus):
            for record, device in gpu.users:
                until = record.summary.seconds
                spans, _ = work_spans(record.events, device.shown, 0.0, until)
                # Of the events that the record has not, only the sum is known.
                last = spans[-1][1] if spans else 0.0
                rest = device.compute - sum(end - start for start, end in spans)
                spans = merge_spans([*spans, (last, last + rest)], 0.0, last + rest)
                works[self.records.index(record)][gpu.machine, gpu.number] = spans
        for number, move in zip(works, in_turns(list(works.values())), strict=True):
            self.records[number].move(move)

    def _name(self, gpu: UsedGpu) -> str:
        name = f"GPU {gpu.number}"
        machines = {other.machine for other in self.gpus}
        return f"{name} of {gpu.machine}" if len(machines) > 1 else name

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """A row for what a process did on a GPU; above, one for a GPU that several used."""
        for gpu in self.gpus:
            indent, capacity = "", format_bytes(gpu.capacity)
            if gpu.is_shared:
                name = f"{self._name(gpu)}, {pluralize(len(gpu.users), 'process')}, reserved"
                yield name, format_bytes(gpu.peak), capacity, "", "", "", ""
                indent, capacity = "  ", ""
            for record, device in gpu.users:
                shares = (device.compute, device.transfer, device.collective)
                idle = max(self.seconds - device.busy, 0.0)
                yield (
                    indent + self._lane(record, device),
                    format_bytes(device.peak),
                    capacity,
                    *(self._share(seconds) for seconds in (*shares, idle)),
                )

    def _share(self, seconds: float) -> str:
        return f"{seconds / self.seconds:.1%}" if self.seconds else "-"

    def _process(self, record: Record) -> str:
        """A process's name: its rank, else its number among those that used a GPU.

        A job array, a restart by torchrun and a second torchrun have a rank 0 each: their
        starts have numbers.
        """
        rank = record.summary.rank
        if rank is not None:
            starts = self._starts()
            if len(starts) == 1:
                return f"rank {rank}"
            return f"start {starts.index(record.summary.start) + 1}, rank {rank}"
        return f"process {self.records.index(record)}"

    def _starts(self) -> list[str]:
        """The starts of ranks, in their order."""
        summaries = (record.summary for record in self.records)
        return list(dict.fromkeys(s.start for s in summaries if s.rank is not None))

    def _lane(self, record: Record, device: Device) -> str:
        """The name of a lane: "cuda:1", "cuda:0 (GPU 3)", "rank 2, cuda:0"."""
        name = f"cuda:{device.shown}"
        if device.number != device.shown:
            name += f" (GPU {device.number})"
        if (
            sum(bool(other.summary.devices) for other in self.records) > 1
            or record.summary.rank is not None
        ):
            name = f"{self._process(record)}, {name}"
        return name


@dataclass(frozen=True)
class Files:
    """The files that a run's report writes, each if it is not None."""

    picture: Path | None = None
    trace: Path | None = None
    page: Path | None = None
    json: Path | None = None


def write(report: Report, exit_code: int, files: Files, command: str = "") -> list[str]:
    """Write the files, each whole or not at all; return a line for each.

    `command` is what the page names as the run's.
    """
    lines = []
    until = report.whole_until()
    part = "" if until is None else f" (the first {format_seconds(until)})"
    picture, trace, json = files.picture, files.trace, files.json
    if picture or trace or files.page:
        timeline = report.timeline()
        if not timeline.lanes:
            lines.append("there is no timeline: no virtual GPU was used.")
        else:
            if picture:
                lines.append(f"timeline{part}: {timeline.plot(picture)}")
            if trace:
                lines.append(f"trace{part}: {timeline.chrome_trace(trace)}")
            if files.page:
                lines.append(f"report{part}: {report.page(files.page, command, exit_code)}")
    if json:
        lines.append(f"numbers: {write_json(json, report.as_json(exit_code))}")
    return lines
