"""Copies on the simulated clock: in stream order, as in PyTorch, and beside the computation only on a side stream."""

import pytest
import torch
from beside import CABLE, ROUND, last
from torch import nn

from multigpu import vgpu


@pytest.fixture
def gpus():
    with vgpu.running(count=2, gpu=ROUND, link=CABLE) as devices:
        yield devices


def test_a_copy_is_in_stream_order_and_on_a_side_stream_it_is_not(gpus):
    """PyTorch: a copy is given to the current streams of its devices, and there waits for what was given before."""
    first, second = gpus
    x, data = torch.zeros(250_000, device=first), torch.zeros(250_000)
    for rows in (data, data.pin_memory()):
        x.add_(1)
        rows.to(first, non_blocking=True)
        assert last("transfer").start == last().end
    there = torch.zeros(250_000, device=second)
    there.add_(1)  # the copy waits for its destination, too
    x.to(second)
    assert last("transfer").start == last().end
    x.add_(1)
    assert last().start == last("transfer").end, "what its source runs later waits"
    x.to("cpu", non_blocking=True)
    x.add_(1)
    assert last().start == last("transfer").end
    side, own = torch.vgpu.Stream(first), torch.vgpu.current_stream(first)
    for stream, beside in ((side, True), (own, False), (None, False)):
        torch.vgpu.synchronize(first)
        x.add_(1)
        with torch.vgpu.stream(stream):
            assert isinstance(torch.vgpu.current_stream(first), torch.vgpu.Stream) == beside
            data.to(first)
        assert (last("transfer").start < last().end) == beside
    assert not isinstance(torch.vgpu.current_stream(first), torch.vgpu.Stream)


def test_data_parallels_pieces_of_a_batch_from_the_host_travel_beside_the_computation(gpus):
    x = torch.zeros(2_500_000, device=gpus[1])
    model = nn.DataParallel(nn.Linear(2500, 1).to(gpus[0]))
    data = torch.zeros(500, 2500)
    x.add_(1)
    busy = last()
    model(data)
    pieces = [event for event in vgpu.timeline().events if event.peer == -1][-2:]
    assert [event.device for event in pieces] == [0, 1] and pieces[1].start < busy.end


def test_a_copy_on_a_side_stream_waits_for_its_source_and_holds_its_destination(gpus):
    first, second = gpus
    x, there = torch.zeros(250_000, device=first), torch.zeros(250_000, device=second)
    side = torch.vgpu.Stream(first)
    x.add_(1)
    with side:
        assert torch.vgpu.current_stream(first) is side
        x.to(second)
        copied = last("transfer")
        assert copied.start == last().end, "what is copied is there only then"
        x.to(second)
        assert last("transfer").start == copied.end, "one copy at a time between two devices"
    x.add_(1)
    assert last().start < last("transfer").end, "the source goes on"
    there.add_(1)
    assert last().start == last("transfer").end, "the destination waits"
    assert torch.vgpu.current_stream(first) != side != torch.vgpu.Stream(first)
