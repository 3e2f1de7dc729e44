"""torch.vgpu has the functions of torch.cuda that programs use."""

import pytest
import torch

from multigpu.virtual import control


def test_ranges_mark_the_timeline(two):
    x = torch.zeros(2, device=two[0])
    assert torch.vgpu.nvtx.range_push("outer") == 0
    assert torch.vgpu.nvtx.range_push("inner") == 1
    x.add_(1)
    assert torch.vgpu.nvtx.range_pop() == 1
    x.mul_(2)
    assert torch.vgpu.nvtx.range_pop() == 0
    assert torch.vgpu.nvtx.range_pop() == -2
    with torch.vgpu.nvtx.range("step {}", 3):
        x.sub_(1)
    x.sqrt_()
    torch.vgpu.nvtx.mark("end")
    timeline = control.timeline()
    notes = {event.name: timeline.notes.get(event) for event in timeline.events}
    assert notes["add_"] == "inner"
    assert notes["mul_"] == "outer"
    assert notes["sub_"] == "step 3"
    assert notes["sqrt_"] is None


def test_an_attribute_that_does_not_exist(two):
    with pytest.raises(
        AttributeError, match=r"module 'torch.vgpu' has no attribute 'nothing'"
    ):
        torch.vgpu.nothing  # noqa: B018
    assert not torch.vgpu.is_current_stream_capturing()
    assert torch.vgpu.memory_snapshot() == []
