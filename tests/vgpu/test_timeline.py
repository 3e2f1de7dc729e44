"""Point 7: what the devices did, as fractions, as a picture, as a trace."""

import json
import pickle

import pytest
import torch
from beside import pipeline

from multigpu import vgpu
from multigpu.errors import UserError
from multigpu.vgpu.sim.timeline import Timeline, merged


def test_the_timeline(two, tmp_path):
    pipeline(two, 2)
    timeline = vgpu.timeline()
    assert timeline.label == "simulated: 2 × V100-16GB, NVLink2" and "simulated" in repr(
        timeline
    )
    assert timeline.events == sorted(timeline.events, key=lambda e: (e.start, e.device, e.end))
    assert (
        timeline.busy(0) + timeline.idle(0) == 1
        and timeline.busy(1, None) >= timeline.busy(1, "transfer") > 0
    )
    with pytest.raises(UserError, match="vgpu:2 is not in this timeline"):
        timeline.busy("vgpu:2")
    for name, start in (
        ("lanes.png", b"\x89PNG"),
        ("lanes.svg", b"<?xml"),
        ("lanes.pdf", b"%PDF"),
    ):
        assert timeline.plot(tmp_path / name, title="Two halves") == tmp_path / name
        assert (tmp_path / name).read_bytes().startswith(start)
    trace = json.loads(timeline.chrome_trace(tmp_path / "trace.json").read_text())
    slices = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert (
        len(slices) == len(timeline.events)
        and slices[0]["ts"] == timeline.events[0].start * 1e6
    )
    assert "simulated" in trace["traceEvents"][0]["args"]["name"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lanes.pdf",
        "lanes.png",
        "lanes.svg",
        "trace.json",
    ]


def test_the_timelines_of_ranks_as_one(tmp_path):
    """A rank with one device and one with two: three lanes, in which each event keeps its place and its time."""
    ranks = []
    for count in (1, 2):
        with vgpu.running(count) as places:
            (
                torch.ones(100, 100, device=places[0]) @ torch.ones(100, 100, device=places[0])
            ).to(places[-1])
            ranks.append(vgpu.timeline())
    whole = Timeline.of_ranks(
        pickle.loads(pickle.dumps(ranks))
    )  # in a process that has no virtual GPUs
    assert whole.lanes == ["rank 0", "rank 1, vgpu:0", "rank 1, vgpu:1"]
    assert (
        whole.label
        == "simulated: 2 ranks, each 1 × V100-16GB, NVLink2 or 2 × V100-16GB, NVLink2"
    )
    assert len(whole.events) == len(ranks[0].events) + len(ranks[1].events)
    assert (whole.start, whole.end) == (0, max(rank.end for rank in ranks))
    for lane, (rank, index) in enumerate([(0, 0), (1, 0), (1, 1)]):
        own = [(e.name, e.start, e.end) for e in ranks[rank].events if e.device == index]
        assert [(e.name, e.start, e.end) for e in whole.events if e.device == lane] == own
    assert (
        whole.busy(1, "transfer") == whole.busy(2, "transfer") > 0 == whole.busy(0, "transfer")
    )
    assert whole.plot().axes[0].get_yticklabels()[0].get_text() == "rank 0"
    with pytest.raises(
        UserError,
        match="3 is not in this timeline: it has rank 0, rank 1, vgpu:0, rank 1, vgpu:1",
    ):
        whole.busy(3)


def test_the_picture_shows_every_event_and_the_label(two):
    pipeline(two, 2)
    timeline = vgpu.timeline()
    figure = timeline.plot(title="Two halves")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vgpu:0", "vgpu:1"]
    texts = [text.get_text() for text in axes.texts]
    assert (
        timeline.label in texts
        and axes.get_xlabel() == "simulated time (ms)"
        and axes.get_title() == "Two halves"
    )
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "forward",
        "transfer",
        "idle",
    ]
    from multigpu.plots import figure as empty

    other = empty().add_subplot()
    assert timeline.plot(other) is other.figure and other.collections


def test_merged_spans():
    assert merged([(3, 4), (0, 1), (0.5, 2), (5, 9)], 0.25, 6) == [(0.25, 2), (3, 4), (5, 6)]
    assert merged([(0, 1)], 2, 3) == [] and Timeline([], ["vgpu:0"], 0, 0, "x").busy(0) == 0
