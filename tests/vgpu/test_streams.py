"""Copies are in stream order, as in PyTorch, and overlap with the computation on a side
stream."""

import pytest
import torch
from compare_devices import CABLE, ROUND, last
from torch import nn

from multigpu import vgpu
from multigpu.vgpu.sim.clock import HOST


@pytest.fixture
def gpus():
    with vgpu.running(count=2, gpu=ROUND, link=CABLE) as devices:
        yield devices


def test_a_copy_is_in_stream_order_unless_it_is_on_a_side_stream(gpus):
    """PyTorch enqueues a copy on the current streams of its devices, after their earlier
    work."""
    first, second = gpus
    x = torch.zeros(250_000, device=first)
    data = torch.zeros(250_000)
    for rows in (data, data.pin_memory()):
        x.add_(1)
        rows.to(first, non_blocking=True)
        assert last("transfer").start == last().end
    y = torch.zeros(250_000, device=second)
    y.add_(1)
    x.to(second)
    assert last("transfer").start == last().end, "the copy waits for its destination, too"
    x.add_(1)
    assert last().start == last("transfer").end, "later work of the source waits"
    x.to("cpu", non_blocking=True)
    x.add_(1)
    assert last().start == last("transfer").end
    side = torch.vgpu.Stream(first)
    own = torch.vgpu.current_stream(first)
    for stream, overlaps in ((side, True), (own, False), (None, False)):
        torch.vgpu.synchronize(first)
        x.add_(1)
        with torch.vgpu.stream(stream):
            current = torch.vgpu.current_stream(first)
            assert isinstance(current, torch.vgpu.Stream) == overlaps
            data.to(first)
        assert (last("transfer").start < last().end) == overlaps
    assert not isinstance(torch.vgpu.current_stream(first), torch.vgpu.Stream)


def test_data_parallels_copies_from_the_host_overlap_with_the_computation(gpus):
    x = torch.zeros(2_500_000, device=gpus[1])
    model = nn.DataParallel(nn.Linear(2500, 1).to(gpus[0]))
    data = torch.zeros(500, 2500)
    x.add_(1)
    busy = last()
    model(data)
    chunks = [event for event in vgpu.timeline().events if event.peer == HOST][-2:]
    assert [event.device for event in chunks] == [0, 1]
    assert chunks[1].start < busy.end


def test_a_copy_on_a_side_stream_waits_for_its_source_and_delays_its_destination(gpus):
    first, second = gpus
    x = torch.zeros(250_000, device=first)
    y = torch.zeros(250_000, device=second)
    side = torch.vgpu.Stream(first)
    x.add_(1)
    with side:
        assert torch.vgpu.current_stream(first) is side
        x.to(second)
        copied = last("transfer")
        assert copied.start == last().end, "it starts when its source is ready"
        x.to(second)
        assert last("transfer").start == copied.end, "one copy at a time between two devices"
    x.add_(1)
    assert last().start < last("transfer").end, "the source continues"
    y.add_(1)
    assert last().start == last("transfer").end, "the destination waits"
    assert torch.vgpu.current_stream(first) != side != torch.vgpu.Stream(first)
