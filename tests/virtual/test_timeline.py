"""The timeline: busy fractions, idle time by reason, notes on events, the picture, the trace
file, and the ranks of a run as one.
"""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from compare_devices import ROUND, pipeline
from torch import nn

from multigpu import Link, plots
from multigpu.errors import UserError
from multigpu.virtual import control
from multigpu.virtual.sim.event import Event
from multigpu.virtual.sim.timeline import Timeline


def test_the_timeline(two, tmp_path):
    pipeline(two, 2)
    timeline = control.timeline()
    assert timeline.label == "simulated: 2 × V100-16GB, NVLink2"
    assert "simulated" in repr(timeline)
    assert timeline.events == sorted(timeline.events, key=lambda e: (e.start, e.device, e.end))
    assert timeline.busy(0) + timeline.idle(0) == 1
    assert timeline.busy(1, None) >= timeline.busy(1, "transfer") > 0
    with pytest.raises(UserError, match=r"vgpu:2 .*vgpu:0, vgpu:1"):
        timeline.busy("vgpu:2")
    trace = json.loads(timeline.chrome_trace(tmp_path / "trace.json").read_text())
    slices = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert slices[0]["ts"] == timeline.events[0].start * 1e6
    assert "simulated" in trace["traceEvents"][0]["args"]["name"]
    picture = tmp_path / "lanes.svg"
    assert timeline.plot(picture, title="Two halves") == picture
    assert picture.read_bytes().startswith(b"<?xml")
    (axes,) = timeline.plot(title="Two halves").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cuda:0", "cuda:1"]
    texts = [text.get_text() for text in axes.texts]
    assert timeline.label in texts and "outputs" in texts
    assert axes.get_xlabel() == "simulated time (ms)"
    assert axes.get_title() == "Two halves"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["forward", "transfer", "bubble"]
    other = plots.figure().add_subplot()
    assert timeline.plot(other) is other.figure
    assert other.collections


def test_the_timelines_of_ranks_as_one(tmp_path):
    """A rank with one device and one with two have three lanes; events keep lane and time."""
    ranks = []
    for count in (1, 2):
        with control.running(count) as places:
            square = torch.ones(100, 100, device=places[0])
            (square @ square).to(places[-1])
            ranks.append(control.timeline())
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


# ---- why a device does not compute ----


def by_hand(*events, lanes=2, end=10):
    """A timeline of (device, kind, start, end, peer); peer −1 is the host."""
    made = [
        Event(device, kind, "forward", kind, start, stop, peer)
        for device, kind, start, stop, peer in events
    ]
    return Timeline(made, [f"lane {i}" for i in range(lanes)], 0, end, "by hand")


def test_waiting_for_the_other_stage_is_a_bubble_and_the_copy_a_transfer():
    """Stage 0 computes for 4 s and sends for 2 s, stage 1 computes for 3 s."""
    timeline = by_hand((0, "compute", 0, 4, None), (0, "transfer", 4, 6, 1),
                       (1, "compute", 6, 9, None))  # fmt: skip
    expected = {"compute": 0.4, "transfer": 0.2, "bubble": 0.3, "launch": 0.1}
    assert timeline.breakdown(0) == pytest.approx(expected)
    expected = {"compute": 0.3, "transfer": 0.2, "bubble": 0.4, "launch": 0.1}
    assert timeline.breakdown(1) == pytest.approx(expected)


def test_a_gap_before_an_operation_is_launch_overhead_although_the_other_device_works():
    """Device 1 is idle from 2 to 5, and nothing that it needs comes from device 0."""
    timeline = by_hand((0, "compute", 0, 10, None), (1, "compute", 0, 2, None),
                       (1, "compute", 5, 10, None))  # fmt: skip
    expected = {"compute": 0.7, "transfer": 0, "bubble": 0, "launch": 0.3}
    assert timeline.breakdown(1) == pytest.approx(expected)


@pytest.mark.parametrize("end", [5, 6])
def test_what_the_host_launches_late_is_launch_overhead(end):
    """Device 0 is ready at 4, but the copy begins at 5: from 4 on device 1 waits for the host.

    The copy takes a second, or with a free link no time.
    """
    timeline = by_hand((0, "compute", 0, 4, None), (0, "transfer", 5, end, 1),
                       (1, "compute", end, 10, None))  # fmt: skip
    assert timeline.breakdown(1)["launch"] == pytest.approx(0.1)
    assert timeline.breakdown(1)["bubble"] == pytest.approx(0.4)


def test_messages_and_collectives_of_ranks_have_equal_times_instead_of_a_peer():
    """Rank 0 sends at 4, when it is ready; rank 1 has waited for that."""
    for kind in ("transfer", "collective"):
        timeline = by_hand((0, "compute", 0, 4, None), (0, kind, 4, 5, None),
                           (1, kind, 4, 5, None), (1, "compute", 5, 10, None))  # fmt: skip
        expected = {"compute": 0.5, "transfer": 0.1, "bubble": 0.4, "launch": 0}
        assert timeline.breakdown(1) == pytest.approx(expected), kind


# A link that costs nothing, and a GPU on which only arithmetic takes time.
FREE = Link("free", bandwidth=1e30, latency=0.0)
ARITHMETIC = replace(ROUND, bandwidth=1e15)


def stages(devices, micro_batches, link=FREE):
    """A step of equal stages. The input needs its gradient, as the other stages' inputs do."""
    with control.running(devices, gpu=ARITHMETIC, link=link, compute=False) as places:
        layers = [nn.Linear(1000, 1000, bias=False, device=place) for place in places]
        batch = torch.empty(4000, 1000, device=places[0], requires_grad=True)
        start = control.elapsed()
        outputs = []
        for x in batch.chunk(micro_batches):
            for layer, place in zip(layers, places, strict=True):
                x = layer(x.to(place))
            outputs.append(x)
        torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
        return control.timeline(since=start)


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 1), (2, 8), (3, 4)])
def test_with_a_free_link_the_bubble_is_the_formulas(devices, micro_batches):
    """(p − 1)/(m + p − 1), for stages that take equally long."""
    timeline = stages(devices, micro_batches)
    for lane in range(devices):
        shares = timeline.breakdown(lane)
        assert sum(shares.values()) == pytest.approx(1)
        formula = (devices - 1) / (micro_batches + devices - 1)
        assert shares["bubble"] == pytest.approx(formula, rel=0.1, abs=0.01)
        assert shares["transfer"] == 0 and shares["launch"] < 0.02


# ---- several streams ----


def test_communication_beside_computation():
    """Copies from 1 to 4 and a collective from 6 to 8; kernels from 0 to 2 and from 3 to 7.

    The time without any of them is launch overhead.
    """
    timeline = by_hand((0, "compute", 0, 2, None), (0, "compute", 3, 7, None),
                       (0, "transfer", 1, 3, -1), (0, "transfer", 2, 4, -1),
                       (0, "collective", 6, 8, None), lanes=1)  # fmt: skip
    expected = {"compute": 0.6, "transfer": 0.2, "bubble": 0, "launch": 0.2}
    assert timeline.breakdown(0) == pytest.approx(expected)
    assert timeline.overlap(0) == pytest.approx(0.3), "1 to 2, 3 to 4, 6 to 7"
    assert timeline.busy(0, None) == pytest.approx(0.8)
    alone = by_hand((0, "compute", 0, 2, None), (1, "transfer", 1, 2, -1))
    assert alone.overlap(0) == alone.overlap(1) == 0


def test_a_kernel_that_pauses_counts_once_and_is_one_box():
    """Kernels of two streams: the first one pauses from 2 to 4 while the second one runs."""
    first = Event(0, "compute", "forward", "mm", 1.0, 8.0)
    second = Event(0, "compute", "forward", "mul", 2.0, 4.0, stream=3)
    timeline = Timeline([first, second], ["GPU 0"], 0.0, 10.0, "simulated")
    assert timeline.busy(0) == pytest.approx(0.7)
    boxes = timeline.plot().axes[0].collections[1]
    (box,) = boxes.get_paths()
    assert (box.vertices[:, 0].min(), box.vertices[:, 0].max()) == (1.0, 8.0)


def test_a_side_stream_has_rows_of_its_own_in_the_trace(two, tmp_path):
    x = torch.ones(100, 100, device=two[0])
    x.mul_(2)
    with torch.vgpu.Stream(two[0]) as side:
        x.add_(1)
        x.cpu()
    trace = json.loads(control.timeline().chrome_trace(tmp_path / "trace.json").read_text())
    rows = {row["name"]: row["tid"] for row in trace["traceEvents"] if row["ph"] == "X"}
    own = f"stream {side.stream_id}"
    assert rows["mul_"] == "compute" and rows["add_"] == f"compute, {own}"
    assert rows["vgpu:0 → host"] == f"transfer, {own}"


# ---- notes on events ----


def carried(timeline):
    return [timeline.notes[e] for e in timeline.events if e.kind == "transfer"]


def test_transfers_of_data_parallel_are_named(two):
    model = nn.DataParallel(nn.Linear(4, 4).to(two[0]), two)
    images = torch.ones(2, 4, device=two[0])
    start = control.elapsed()
    model(images).sum().backward()
    names = carried(control.timeline(start))
    assert names == ["inputs", "weights", "outputs", "gradients", "gradients"]


def test_micro_batches_are_numbered_in_forward_and_in_backward(two):
    """Autograd goes back through the last micro-batch first. The loss has no number."""
    first = nn.Linear(4, 4).to(two[0])
    second = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(two[1])
    control.number_micro_batches(first, second, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    batch = torch.ones(6, 4, device=two[0], requires_grad=True)
    for _ in range(2):
        start = control.elapsed()
        outputs = [second(first(x).to(two[1])) for x in batch.chunk(3)]
        torch.cat(outputs).square().mean().backward()
        optimizer.step()
    timeline = control.timeline(start)

    def numbers(phase, lane):
        events = [e for e in timeline.events if (e.phase, e.device) == (phase, lane)]
        notes = [timeline.notes.get(e, "") for e in events if e.kind == "compute"]
        return [note for i, note in enumerate(notes) if i == 0 or note != notes[i - 1]]

    assert numbers("forward", 0) == ["1", "2", "3"]
    assert numbers("forward", 1) == ["1", "2", "3", ""]
    assert numbers("backward", 0) == ["3", "2", "1"]
    assert numbers("backward", 1) == ["", "3", "2", "1"]
    (axes,) = timeline.plot().axes
    assert {"1", "2", "3"} <= {text.get_text() for text in axes.texts}


def test_a_label_that_names_the_contents_does_not_repeat_them():
    """DDP's all-reduce begins at the moment in which a stage sends its last gradients."""
    send = Event(0, "transfer", "backward", "copy", 4.0, 4.1, 1)
    reduce = Event(0, "collective", "backward", "allreduce", 4.0, 9.0)
    notes = {send: "gradients"}
    timeline = Timeline([send, reduce], ["GPU 0", "GPU 1"], 0.0, 10.0, "simulated", notes)
    texts = [text.get_text() for text in timeline.plot().axes[0].texts]
    assert "all-reduce: gradients" in texts
    assert not any(";" in text for text in texts)


def test_the_share_beside_a_lane_has_the_name_that_is_in_the_legend():
    timeline = by_hand((0, "transfer", 0, 1, 1), (0, "collective", 1, 9, None),
                       (1, "transfer", 0, 8, -1))  # fmt: skip
    texts = [text.get_text() for text in timeline.plot().axes[0].texts]
    assert "busy 0%\ncollective 90%" in texts
    assert "busy 0%\ntransfer 80%\nbubble 10%" in texts, "the bubble is there, too"
