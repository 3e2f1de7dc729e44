"""The current device: what "vgpu" without an index means in all of torch."""

import threading

import pytest
import torch


def test_torch_accelerator_knows_the_current_device(two):
    torch.vgpu.set_device(1)
    assert torch.accelerator.current_device_index() == 1
    torch.accelerator.set_device_index(0)
    assert torch.vgpu.current_device() == 0
    with torch.accelerator.device_index(1):
        assert torch.ones(2).to("vgpu").device == two[1]
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_stream(1).device.type == "vgpu"
    torch.accelerator.synchronize(1)
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
