"""What a process records, in bounded space, and what the report makes of it."""

import random

import numpy as np
import pytest
import torch

from multigpu.virtual import busy, control, recorder
from multigpu.virtual.lanes import text_lanes
from multigpu.virtual.options import Options
from multigpu.virtual.record import Device, Summary, append_events, read_records, write_summary
from multigpu.virtual.recorder import Recorder
from multigpu.virtual.report import Files, Report, write
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.event import HOST, Event
from multigpu.virtual.sim.spans import merge_spans
from multigpu.virtual.sim.timeline import Timeline


def spans_in_pieces(pieces: int) -> list[list[tuple[float, float]]]:
    """Spans of two streams: in each piece the second stream's are later than the first's."""
    draw = random.Random(0)
    times = [0.0, 0.3]
    made = []
    for _ in range(pieces):
        piece = []
        for stream in (0, 1):
            for _ in range(draw.randrange(5)):
                start = times[stream] + draw.choice([0.0, draw.random()])
                times[stream] = start + draw.random()
                piece.append((start, times[stream]))
        made.append(piece)
    return made


@pytest.mark.parametrize("open_gaps", [1000, 40])
def test_busy_seconds_are_the_length_of_the_union(monkeypatch, open_gaps):
    monkeypatch.setattr(busy, "OPEN", open_gaps)
    seconds = busy.Busy()
    spans = []
    for piece in spans_in_pieces(200):
        spans += piece
        seconds.add(np.array([s for s, _ in piece]), np.array([t for _, t in piece]))
        union = merge_spans(spans, 0.0, 1e9)
        assert seconds.seconds == pytest.approx(sum(t - s for s, t in union))


def test_what_is_final_is_not_counted_again(monkeypatch):
    monkeypatch.setattr(busy, "OPEN", 2)
    seconds = busy.Busy()
    starts = np.arange(0.0, 20.0, 2.0)
    for _ in range(2):
        seconds.add(starts, starts + 1)
        assert seconds.seconds == 10


@pytest.fixture
def a_recorder(tmp_path, monkeypatch, two):
    """The recorder of two virtual GPUs; the test writes, and no thread."""
    monkeypatch.setattr(recorder, "INTERVAL", 1e6)
    made = Recorder(tmp_path, [4, 7])
    yield made
    made.finish()


def work() -> None:
    """Operations on vgpu:0, and transfers between both GPUs."""
    x = torch.ones(2**16, device="vgpu:0")
    for _ in range(20):
        (x + 1).to("vgpu:1")


def test_a_record_is_the_timelines(tmp_path, a_recorder):
    work()
    with control.marked("quantise"):
        work()
    torch.vgpu.reset_peak_memory_stats(0)
    timeline = control.timeline()
    a_recorder.write()
    (record,) = read_records(tmp_path)
    assert record.events == timeline.events
    assert record.notes == timeline.notes and "quantise" in record.notes.values()
    summary = record.summary
    assert summary.seconds == timeline.end and not summary.ended
    assert [(device.number, device.shown) for device in summary.devices] == [(4, 0), (7, 1)]
    for device in summary.devices:
        for kind in ("compute", "transfer", "collective"):
            share = timeline.busy(device.shown, kind)
            assert getattr(device, kind) == pytest.approx(share * timeline.end)
        assert device.busy == pytest.approx(timeline.busy(device.shown, None) * timeline.end)
    # x and x + 1, before the peak was reset.
    assert summary.devices[0].peak == 2 * 2**18
    joined = Report(tmp_path, Options()).timeline()
    assert joined.lanes == ["cuda:0 (GPU 4)", "cuda:1 (GPU 7)"]
    assert joined.events == timeline.events and joined.notes == timeline.notes


def test_a_long_run_needs_no_more_space(tmp_path, monkeypatch, a_recorder):
    monkeypatch.setattr(recorder, "LIMIT", 50)
    sizes = []
    work()
    clock = machine.current().clock
    computed = a_recorder.computed(0)
    assert computed > 0
    for number in range(6):
        work()
        a_recorder.write()
        assert clock.events() == []
        assert a_recorder.computed(0) == pytest.approx(computed * (number + 2))
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    # Numbers grow by some digits.
    assert sizes[-1] < sizes[2] + 100
    (record,) = read_records(tmp_path)
    assert len(record.events) == 50 and record.summary.events == 7 * 41
    assert 0 < record.summary.whole_until < record.summary.seconds / 4
    report = Report(tmp_path, Options())
    assert report.timeline().end == record.summary.whole_until
    lines = write(report, 0, Files(trace=tmp_path / "trace.json"))
    assert "the first" in lines[0]
    # All the work is in the table.
    compute = record.summary.devices[0].compute
    assert compute > 4 * sum(e.end - e.start for e in record.events if e.kind == "compute")


def test_what_was_left_out_is_said(tmp_path, monkeypatch, a_recorder):
    monkeypatch.setattr(recorder, "left_out", ["torch.compile is left out."])
    a_recorder.finish()
    (record,) = read_records(tmp_path)
    assert record.summary.left_out == ["torch.compile is left out."]
    assert Report(tmp_path, Options(clock="simulated")).remarks() == [
        "The CPU computes the numbers.",
        "torch.compile is left out.",
    ]


def a_record(folder, name, rank, seconds, devices, events, start="", started=0.0):
    summary = Summary(1, rank, started, "label", seconds, start, ended=True)
    summary.devices = [Device(number, number, 1024, 2048, compute=1.0) for number in devices]
    write_summary(folder / f"{name}.json", summary)
    append_events(
        folder / f"{name}.events", [value for event in events for value in event], {}
    )


def test_ranks_are_joined_in_one_timeline(tmp_path):
    send = Event(1, "transfer", "forward", "to the host", 1.0, 2.0, HOST)
    add = Event(1, "compute", "forward", "add", 0.0, 1.0)
    copy = Event(0, "transfer", "forward", "copy", 2.0, 3.0, 1)
    a_record(tmp_path, "b", 1, 4.0, [1], [add, send])
    a_record(tmp_path, "a", 0, 2.0, [0, 1], [copy, add])
    # A process that was killed while it wrote.
    whole = (tmp_path / "b.events").read_bytes()
    (tmp_path / "b.events").write_bytes(whole + whole[:-20])
    report = Report(tmp_path, Options(gpus=2, gpu="A100-80GB"))
    timeline = report.timeline()
    assert timeline.lanes == ["rank 0, cuda:0", "rank 0, cuda:1", "rank 1, cuda:1"]
    assert [(event.device, event.name, event.peer) for event in timeline.events] == [
        (1, "add", None),
        (2, "add", None),
        (2, "to the host", HOST),
        (0, "copy", 1),
    ]
    assert timeline.end == 4.0
    lines = report.text().splitlines()
    assert lines[0] == "simulated: 2 × A100-80GB, NVLink2"
    assert lines[1] == "simulated time: 4.00 s"
    rows = [line.split() for line in lines if "KiB" in line]
    assert rows[0][:7] == ["rank", "0,", "cuda:0", "1.00", "KiB", "2.00", "KiB"]
    # Both ranks used GPU 1, which has its memory once.
    assert " ".join(rows[1]) == "GPU 1, 2 processes, reserved 1.00 KiB 2.00 KiB"
    assert rows[3][3:] == ["1.00", "KiB", "25.0%", "0.0%", "0.0%", "100.0%"]


def test_two_starts_of_the_same_ranks(tmp_path):
    for name, rank, start, started in (
        ("a", 0, "second", 3.0),
        ("b", 1, "second", 2.5),
        ("c", 1, "first", 1.0),
        ("d", 0, "first", 2.0),
        ("e", None, "", 0.0),
    ):
        a_record(tmp_path, name, rank, 1.0, [rank or 0], [], start, started)
    assert Report(tmp_path, Options(gpus=2)).timeline().lanes == [
        "start 1, rank 0, cuda:0",
        "start 1, rank 1, cuda:1",
        "start 2, rank 0, cuda:0",
        "start 2, rank 1, cuda:1",
        "process 4, cuda:0",
    ]


def test_what_tells_the_starts_apart(tmp_path, monkeypatch, a_recorder):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    starts = []
    for restarts in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        a_recorder.start = ""
        work()
        a_recorder.write()
        (record,) = read_records(tmp_path)
        assert record.summary.rank == 1
        starts.append(record.summary.start)
    assert starts[0] == starts[1] != starts[2]


def test_a_timeline_as_text():
    events = [
        Event(0, "compute", "forward", "add", 0.0, 8.0),
        Event(0, "collective", "backward", "allreduce", 4.0, 16.0),
        Event(1, "transfer", "forward", "copy", 8.0, 12.0, 0),
        Event(1, "compute", "forward", "add", 24.125, 24.25),
        Event(1, "compute", "forward", "add", 31.5, 40.0),
    ]
    lines = text_lanes(Timeline(events, ["cuda:0", "rank 1, cuda:1"], 0.0, 32.0, "label"))
    assert lines[0].startswith("timeline until 32.00 s: ")
    # Each character is half a second.
    assert lines[1:] == [
        f"cuda:0          |{'█' * 16}{'~' * 16}{' ' * 32}|",
        f"rank 1, cuda:1  |{' ' * 16}{'~' * 8}{' ' * 24}▂{' ' * 14}█|",
    ]
