"""The current device: what "vgpu" without an index means in all of torch."""

import threading

import pytest
import torch
from torch import nn

CALLS = {
    "zeros": lambda: torch.zeros(2, device="vgpu"),
    "zeros_like": lambda: torch.zeros_like(torch.ones(2), device="vgpu"),
    "tensor": lambda: torch.tensor([1.0], device="vgpu"),
    "as_tensor": lambda: torch.as_tensor([1.0], device=torch.device("vgpu")),
    "asarray": lambda: torch.asarray([1.0], device="vgpu"),
    "new_tensor": lambda: torch.ones(2).new_tensor([1.0], device="vgpu"),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0]], [1.0], (1,), device="vgpu"),
    "to a name": lambda: torch.ones(2).to("vgpu"),
    "to a device": lambda: torch.ones(2).to(torch.device("vgpu"), torch.float16),
    "to by keyword": lambda: torch.ones(2).to(device="vgpu", dtype=torch.float16),
    "to from another device": lambda: torch.ones(2, device="vgpu:0").to("vgpu"),
    "vgpu": lambda: torch.ones(2).vgpu(),
    "a layer": lambda: nn.Linear(2, 2, device="vgpu").weight,
    "Module.to": lambda: nn.Linear(2, 2).to("vgpu").weight,
    "Module.to_empty": lambda: nn.Linear(2, 2, device="meta").to_empty(device="vgpu").weight,
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_vgpu_means_the_current_device(two, make):
    assert make().device == two[0]
    with torch.vgpu.device(1):
        assert make().device == two[1]
    torch.vgpu.set_device(1)
    assert make().device == two[1]
    assert torch.ones(2).to("vgpu:0").device == two[0]
    assert torch.tensor([1.0], device="vgpu:0").device == two[0]
    assert torch.ones(2).to(torch.float16).is_cpu


def test_the_default_device_follows_the_current_device(two):
    with torch.device("vgpu"):
        torch.vgpu.set_device(1)
        assert [torch.ones(1).device, torch.tensor([1.0]).device] == [two[1], two[1]]
        assert torch.as_tensor([1.0], device="cpu").is_cpu
    torch.set_default_device("vgpu")
    try:
        assert torch.tensor([1.0]).device == two[1]
        with torch.device("cpu"):
            assert torch.tensor([1.0]).is_cpu
    finally:
        torch.set_default_device(None)
    assert torch.tensor([1.0]).is_cpu


def test_torch_accelerator_knows_the_current_device(two):
    torch.vgpu.set_device(1)
    assert torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index(0)
    assert torch.vgpu.current_device() == 0
    with torch.accelerator.device_index(1):
        assert torch.ones(2).to("vgpu").device == two[1]
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(1).device.type == "vgpu"
    x = torch.ones(1024, device=two[1])
    torch.accelerator.synchronize(1)
    assert torch.accelerator.memory_allocated(1) == x.nbytes
    assert torch.accelerator.memory_stats(1)["allocated_bytes.all.current"] == x.nbytes
    assert torch.accelerator.get_memory_info(1) == torch.vgpu.mem_get_info(1)
    del x
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == 0
    torch.accelerator.empty_cache()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(2)


def test_each_thread_has_a_current_device(two):
    torch.vgpu.set_device(1)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1).to("vgpu").device))
    thread.start()
    thread.join()
    assert found == [two[0]]


def test_a_tensor_of_numbers_and_tensors(two):
    x = torch.tensor(3.0, device=two[1])
    assert torch.tensor([x, 1]).tolist() == [3, 1]
    assert torch.tensor([x, x + 1], device=two[1]).tolist() == [3, 4]
