"""torch.cuda, torch.accelerator and torch.backends on virtual GPUs."""

import threading
import warnings

import pytest
import torch
from torch.cuda import _memory_viz
from torch.nn.parallel import comm

from multigpu.errors import UserError
from multigpu.virtual import control

MIB = 2**20


def test_what_the_gpus_are(cuda):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.name == torch.cuda.get_device_name(1) == "V100-16GB (virtual)"
    assert (
        (properties.major, properties.minor) == torch.cuda.get_device_capability(0) == (7, 0)
    )
    assert properties.total_memory == 16 * 2**30 and properties.multi_processor_count == 80
    # 877 MHz, as NVIDIA's white paper on V100 says of its memory.
    assert properties.memory_clock_rate == pytest.approx(877_000, rel=0.01)
    assert "total_memory=16384MB" in repr(properties)
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)
    assert "sm_70" in torch.cuda.get_arch_list() and "sm_90" in torch.cuda.get_gencode_flags()
    assert torch.cuda.can_device_access_peer(0, 1)
    assert torch.version.cuda and torch.backends.cuda.is_built()
    assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() > 90000
    assert torch.cuda.nccl.version() >= (2, 10)


def test_the_current_device(cuda):
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.ones(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    with torch.cuda.device_of(torch.ones(1, device="cuda:1")):
        assert torch.cuda.current_device() == 1
    with torch.cuda.device_of(torch.ones(1)), torch.cuda.device(-1):
        assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:1")
    torch.cuda.set_device(-1)
    assert torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index(0)
    assert torch.cuda.current_device() == 0
    with torch.accelerator.device_index(1):
        assert torch.ones(2).to("cuda").device.index == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(2)


def test_each_thread_has_a_current_device(cuda):
    torch.cuda.set_device(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1).to("cuda").device))
    thread.start()
    thread.join()
    assert found == [cuda[0]]


def test_the_accelerator(cuda):
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    # fully_shard makes its default mesh of this device type.
    assert torch._C._get_accelerator() == torch.device("cuda")
    torch.ones(1, device="cuda")
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.allocated"] == 0
    if hasattr(torch.accelerator, "get_device_capability"):
        dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
        assert torch.bfloat16 in dtypes
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().device == torch.device("cuda:0")
    kept = torch.ones(MIB // 4, device="cuda")
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= kept.nbytes


def test_memory(cuda):
    before = torch.cuda.memory_allocated(1)
    torch.cuda.reset_peak_memory_stats(1)
    large = torch.ones(8 * MIB, dtype=torch.uint8, device="cuda:1")
    small = torch.ones(1, device="cuda:1")
    assert torch.cuda.memory_allocated(1) - before == 8 * MIB + 512
    # The large tensor has a segment of 20 MiB, and the small one is in one of 2 MiB.
    assert torch.cuda.memory_reserved(1) == 22 * MIB
    stats = torch.cuda.memory_stats(1)
    assert stats["segment.all.current"] == 2
    assert stats["reserved_bytes.large_pool.current"] == 20 * MIB
    assert stats["inactive_split_bytes.all.current"] == 22 * MIB - 8 * MIB - 512 - before
    assert stats["allocated_bytes.large_pool.current"] >= 8 * MIB
    assert 512 <= stats["allocated_bytes.small_pool.current"] < MIB
    segments = [one for one in torch.cuda.memory_snapshot() if one["device"] == 1]
    used = [b for one in segments for b in one["blocks"] if b["state"] == "active_allocated"]
    assert stats["allocation.all.current"] == len(used)
    assert {large.data_ptr(), small.data_ptr()} <= {block["address"] for block in used}
    free, total = torch.cuda.mem_get_info(1)
    assert total == 16 * 2**30 and total - free == 22 * MIB
    peak = torch.cuda.memory_allocated(1)
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated(1) == peak
    assert torch.cuda.memory_reserved(1) == 2 * MIB
    assert torch.cuda.max_memory_reserved(1) == 22 * MIB
    assert torch.cuda.memory_allocated(1) - before == 512 and small.item() == 1
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == torch.cuda.memory_allocated(1)
    assert "8192" not in torch.cuda.memory_summary(0, abbreviated=True)
    assert "GPU:1" in torch.cuda.list_gpu_processes(1)


def test_a_share_of_the_memory(cuda):
    torch.cuda.set_per_process_memory_fraction(0.25, 1)
    try:
        assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
        with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1 has .* 4\.00 GiB allowed"):
            torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda:1")
        assert torch.cuda.get_device_properties(1).total_memory == 16 * 2**30
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)


def test_streams_and_events(cuda):
    """They are those of test_streams.py."""
    side, other = torch.cuda.Stream(), torch.Stream(device="cuda:1")
    event = torch.Event(device="cuda", enable_timing=True)
    assert isinstance(other, torch.cuda.Stream) and isinstance(side, torch.Stream)
    assert isinstance(event, torch.cuda.Event) and other.device == torch.device("cuda:1")
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        numbers = torch.ones(2).cuda(non_blocking=True)
    numbers.record_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() == side and "cuda:0" in repr(side)
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_ranges_for_profilers_mark_the_timeline(cuda):
    nvtx = torch.cuda.nvtx
    x = torch.zeros(2, device="cuda")
    assert nvtx.range_push("outer") == 0
    assert nvtx.range_push("inner") == 1
    x.add_(1)
    assert nvtx.range_pop() == 1
    x.mul_(2)
    assert nvtx.range_pop() == 0
    assert nvtx.range_pop() == -2
    with nvtx.range("step {}", 3):
        x.sub_(1)
    x.sqrt_()
    nvtx.mark("end")
    nvtx.range_end(nvtx.range_start("long"))
    timeline = control.timeline()
    notes = {event.name: timeline.notes.get(event) for event in timeline.events}
    names = ("add_", "mul_", "sub_", "sqrt_")
    assert [notes[name] for name in names] == ["inner", "outer", "step 3", None]
    with torch.autograd.profiler.emit_nvtx(record_shapes=True) as emitting:
        assert torch.ones(2, device="cuda").sum() == 2
    assert isinstance(emitting, torch.autograd.profiler.emit_nvtx)
    with torch.autograd.profiler.emit_nvtx(enabled=False) as emitting:
        assert emitting is None


def test_torchs_viewer_reads_the_snapshot_and_the_history(cuda):
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], []]
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=100)
    try:
        kept = torch.ones(5 * MIB, device="cuda:1")
        torch.ones(3, device="cuda:1")
        torch.cuda.memory_allocated(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20 * 2**30, device="cuda:1")
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert torch.cuda.memory._snapshot()["device_traces"] == [[], []]
    assert "[a] 20.0MiB allocated, 0.0B free" in _memory_viz.segsum(snapshot)
    trace = _memory_viz.trace(snapshot)
    assert f"cudaMalloc({kept.data_ptr()}, 20.0MiB)" in trace
    assert "free completed" in trace and "OutOfMemoryError # 80.0GiB requested" in trace
    (block,) = [
        block
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["address"] == kept.data_ptr()
    ]
    assert any(frame["filename"] == __file__ for frame in block["frames"])


def test_graphs_are_refused_with_a_sentence(cuda):
    for attempt in (
        torch.cuda.CUDAGraph,
        lambda: torch.cuda.graph(None),
        lambda: torch.cuda.make_graphed_callables(torch.nn.Linear(1, 1), (torch.ones(1),)),
    ):
        with pytest.raises(UserError, match="CUDA graphs do not run on virtual GPUs"):
            attempt()
    assert torch.cuda.is_current_stream_capturing() is False


def test_calls_that_are_accepted_and_change_nothing(cuda):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.init()
        torch.cuda.ipc_collect()
        torch.cuda.set_sync_debug_mode("warn")
        assert torch.cuda.get_sync_debug_mode() == 1
        torch.cuda.set_sync_debug_mode(0)
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.memory.reset_peak_host_memory_stats()


def test_copies_of_data_parallel_have_two_names(cuda):
    import torch.cuda.comm

    tensor = torch.arange(4.0, device="cuda")
    for module in (comm, torch.cuda.comm):
        parts = module.scatter(tensor, [0, 1])
        assert [str(part.device) for part in parts] == ["cuda:0", "cuda:1"]
        assert module.gather(parts, destination=0).tolist() == [0, 1, 2, 3]
        copies = module.broadcast(tensor, ["cuda:0", 1])
        assert copies[1].device == torch.device("cuda:1")
        total = module.reduce_add(list(copies), 0)
        assert total.tolist() == [0, 2, 4, 6] and total.device == torch.device("cuda:0")
    # A tensor of the host is scattered, too.
    assert comm.scatter(torch.ones(2), [0, 1])[1].device == torch.device("cuda:1")


def test_accumulated_counters_are_reset(cuda):
    torch.cuda.synchronize()
    kept = torch.ones(1000, device="cuda")
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] >= kept.nbytes
    for name in ("allocation", "allocated_bytes"):
        assert stats[f"{name}.all.allocated"] == stats[f"{name}.all.freed"] == 0
    del kept
    torch.ones(100, device="cuda")
    stats = torch.cuda.memory_stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (1, 2)
    assert stats["allocated_bytes.all.allocated"] == 512
    assert stats["allocated_bytes.all.freed"] == 4096 + 512


def test_what_needs_addresses_is_refused_with_a_sentence(cuda):
    for attempt in (
        torch.cuda.MemPool,
        lambda: torch.cuda.ExternalStream(1),
        lambda: torch.cuda.caching_allocator_alloc(8 * MIB),
    ):
        with pytest.raises(UserError, match="no memory at addresses"):
            attempt()
    assert torch.cuda.cudart().cudaHostRegister(0, 16, 0) == 0


def test_cublas_takes_a_workspace_for_each_thread_and_stream(cuda, monkeypatch):
    """As an H100 does: benchmarks/gpu. A V100's is smaller."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch._C._cuda_clearCublasWorkspaces()
    workspace = 8_519_680
    assert torch._C._cuda_getCublasWorkspaceSize() == workspace
    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    images = torch.ones(1, 1, 8, 8, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.nn.functional.conv2d(images, images)
    assert torch.cuda.memory_allocated() == before, "cuDNN's are not kept"
    out = (weight @ weight).sum()
    kept = torch.cuda.memory_allocated() - before
    assert workspace < kept < workspace + 20 * 2**10
    out.backward()
    kept = torch.cuda.memory_allocated() - before
    assert 2 * workspace < kept < 2 * workspace + 40 * 2**10
    for _ in range(2):
        (weight @ weight).sum().backward()
        assert torch.cuda.memory_allocated() - before == kept
    with torch.cuda.stream(torch.cuda.Stream()):
        (weight @ weight).detach_()
    assert torch.cuda.memory_allocated() - before == kept + workspace
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before == kept - 2 * workspace
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    weight.detach() @ weight.detach()
    assert torch.cuda.memory_allocated() - before == kept - 2 * workspace + 128 * 2**10
