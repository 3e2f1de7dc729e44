"""torch.vgpu has the functions of torch.cuda that programs use."""

import pytest
import torch

from multigpu.virtual import control


def test_a_gpus_properties():
    with control.running(count=2, gpu="A100-40GB", memory="1GiB"):
        properties = torch.vgpu.get_device_properties(1)
        assert properties.name == torch.vgpu.get_device_name(1) == "A100-40GB (virtual)"
        assert (properties.major, properties.minor) == (8, 0)
        assert properties.multi_processor_count == 108
        assert properties.total_memory == 2**30
        assert torch.vgpu.get_device_capability() == (8, 0)
        assert torch.vgpu.get_arch_list() == ["sm_80"]
        assert torch.vgpu.can_device_access_peer(0, 1)
        assert not torch.vgpu.can_device_access_peer(0, 0)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.vgpu.get_device_properties(2)
    with control.running(gpu="H100-80GB"):
        assert torch.vgpu.get_device_capability() == (9, 0)
    with control.running(gpu="V100-16GB"):
        assert torch.vgpu.get_device_capability() == (7, 0)


def test_the_statistics_of_the_memory():
    with control.running(count=1, memory="1MiB") as (device,):
        x = torch.empty(1024, device=device)
        y = torch.empty(256, device=device)
        del y
        with pytest.raises(torch.vgpu.OutOfMemoryError):
            torch.empty(2**20, device=device)
        stats = torch.vgpu.memory_stats()
        for what in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            assert stats[f"{what}.all.current"] == x.nbytes
            assert stats[f"{what}.all.peak"] == x.nbytes + 1024
            assert stats[f"{what}.all.allocated"] == x.nbytes + 1024
            assert stats[f"{what}.all.freed"] == 1024
        assert stats["allocation.all.current"] == 1
        assert stats["allocation.all.freed"] == 1
        assert stats["num_ooms"] == 1
        torch.vgpu.reset_accumulated_memory_stats()
        assert torch.vgpu.memory_stats()["allocated_bytes.all.freed"] == 0
        torch.vgpu.reset_max_memory_allocated()
        assert torch.vgpu.max_memory_allocated() == x.nbytes


def test_a_process_can_limit_its_memory():
    with control.running(count=1, memory="8KiB") as (device,):
        torch.vgpu.set_per_process_memory_fraction(0.5)
        assert torch.vgpu.get_per_process_memory_fraction() == 0.5
        message = r"total capacity of 8.00 KiB .* is free. 4.00 KiB allowed; Of the"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.ones(1025, device=device)
        torch.ones(1024, device=device)
        assert torch.vgpu.mem_get_info() == (8192, 8192)
        torch.vgpu.set_per_process_memory_fraction(1.0)
        torch.ones(2048, device=device)
        with pytest.raises(ValueError, match=r"Invalid fraction value: 2. Allowed range: 0~1"):
            torch.vgpu.set_per_process_memory_fraction(2)


def test_typed_tensors(two):
    torch.vgpu.set_device(1)
    x = torch.vgpu.FloatTensor([1.0, 2.0])
    assert x.tolist() == [1, 2]
    assert x.device == two[1]
    assert isinstance(x, torch.vgpu.FloatTensor)
    assert not isinstance(x, torch.vgpu.LongTensor)
    assert not isinstance(x.cpu(), torch.vgpu.FloatTensor)
    assert torch.vgpu.LongTensor(2, 3).shape == torch.vgpu.LongTensor(torch.Size([2, 3])).shape
    assert torch.vgpu.HalfTensor().dtype is torch.float16
    for name in ("torch.vgpu.LongTensor", torch.vgpu.LongTensor):
        assert x.type(name).dtype is torch.int64
        assert torch.ones(2).type(name).is_vgpu
    assert x.type() == "torch.vgpu.FloatTensor"


def test_the_default_tensor_type(two):
    torch.set_default_tensor_type("torch.vgpu.DoubleTensor")
    try:
        assert torch.zeros(2).device == two[0]
        assert torch.tensor([1.0]).dtype is torch.float64
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.tensor([1.0]).is_cpu
    assert torch.zeros(2).dtype is torch.float32


def test_functions_for_several_devices(two):
    x = torch.ones(4, device=two[0])
    copies = torch.vgpu.comm.broadcast(x, [0, 1])
    assert [part.device for part in copies] == list(two)
    assert torch.vgpu.comm.reduce_add(copies, 1).tolist() == [2] * 4
    assert torch.vgpu.comm.gather(torch.vgpu.comm.scatter(x, [0, 1]), 0, 0).tolist() == [1] * 4


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


def test_utilization_is_the_busy_share_of_the_simulated_time(two):
    assert torch.vgpu.utilization() == 0
    x = torch.ones(2048, 2048, device=two[0])
    for _ in range(5):
        x = x @ x
    assert torch.vgpu.utilization() > 50
    assert torch.vgpu.utilization(1) == 0


def test_an_attribute_that_does_not_exist(two):
    with pytest.raises(
        AttributeError, match=r"module 'torch.vgpu' has no attribute 'nothing'"
    ):
        torch.vgpu.nothing  # noqa: B018
    assert not torch.vgpu.is_current_stream_capturing()
    assert torch.vgpu.memory_snapshot() == []
