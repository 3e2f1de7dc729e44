"""The timeline: busy fractions, the picture, the trace file, and the ranks of a run as one."""

import json
import pickle

import pytest
import torch
from compare_devices import pipeline

from multigpu import plots, vgpu
from multigpu.errors import UserError
from multigpu.vgpu.sim.spans import merge_spans
from multigpu.vgpu.sim.timeline import Timeline


def test_the_timeline(two, tmp_path):
    pipeline(two, 2)
    timeline = vgpu.timeline()
    assert timeline.label == "simulated: 2 × V100-16GB, NVLink2"
    assert "simulated" in repr(timeline)
    assert timeline.events == sorted(timeline.events, key=lambda e: (e.start, e.device, e.end))
    assert timeline.busy(0) + timeline.idle(0) == 1
    assert timeline.busy(1, None) >= timeline.busy(1, "transfer") > 0
    with pytest.raises(UserError, match=r"vgpu:2 .*vgpu:0, vgpu:1"):
        timeline.busy("vgpu:2")
    signatures = {"lanes.pdf": b"%PDF", "lanes.png": b"\x89PNG", "lanes.svg": b"<?xml"}
    for name, signature in signatures.items():
        assert timeline.plot(tmp_path / name, title="Two halves") == tmp_path / name
        assert (tmp_path / name).read_bytes().startswith(signature)
    trace = json.loads(timeline.chrome_trace(tmp_path / "trace.json").read_text())
    slices = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert slices[0]["ts"] == timeline.events[0].start * 1e6
    assert "simulated" in trace["traceEvents"][0]["args"]["name"]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [*signatures, "trace.json"]


def test_the_timelines_of_ranks_as_one(tmp_path):
    """A rank with one device and one with two have three lanes; events keep lane and time."""
    ranks = []
    for count in (1, 2):
        with vgpu.running(count) as places:
            square = torch.ones(100, 100, device=places[0])
            (square @ square).to(places[-1])
            ranks.append(vgpu.timeline())
    # The process that gathers the timelines may have no virtual GPUs.
    whole = Timeline.of_ranks(pickle.loads(pickle.dumps(ranks)))
    assert whole.lanes == ["rank 0", "rank 1, vgpu:0", "rank 1, vgpu:1"]
    machines = "1 × V100-16GB, NVLink2 or 2 × V100-16GB, NVLink2"
    assert whole.label == f"simulated: 2 ranks, each {machines}"
    assert len(whole.events) == len(ranks[0].events) + len(ranks[1].events)
    assert (whole.start, whole.end) == (0, max(rank.end for rank in ranks))
    for lane, (rank, index) in enumerate([(0, 0), (1, 0), (1, 1)]):
        own = [(e.name, e.start, e.end) for e in ranks[rank].events if e.device == index]
        assert [(e.name, e.start, e.end) for e in whole.events if e.device == lane] == own
    assert whole.busy(0, "transfer") == 0
    assert whole.busy(1, "transfer") == whole.busy(2, "transfer") > 0
    assert whole.plot().axes[0].get_yticklabels()[0].get_text() == "rank 0"
    with pytest.raises(UserError, match=r"^3 .*rank 0, rank 1, vgpu:0, rank 1, vgpu:1"):
        whole.busy(3)


def test_the_picture_shows_every_event_and_the_label(two):
    pipeline(two, 2)
    timeline = vgpu.timeline()
    figure = timeline.plot(title="Two halves")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vgpu:0", "vgpu:1"]
    texts = [text.get_text() for text in axes.texts]
    assert timeline.label in texts
    assert axes.get_xlabel() == "simulated time (ms)"
    assert axes.get_title() == "Two halves"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["forward", "transfer", "idle"]
    other = plots.figure().add_subplot()
    assert timeline.plot(other) is other.figure
    assert other.collections


def test_merged_spans():
    assert merge_spans([(3, 4), (0, 1), (0.5, 2), (5, 9)], 0.25, 6) == [
        (0.25, 2),
        (3, 4),
        (5, 6),
    ]
    assert merge_spans([(0, 1)], 2, 3) == []
    assert Timeline([], ["vgpu:0"], 0, 0, "x").busy(0) == 0
