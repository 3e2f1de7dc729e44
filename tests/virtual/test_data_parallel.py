"""DataParallel runs unmodified on virtual GPUs, and equals the serial run."""

import copy

import pytest
import torch
from torch import nn

from multigpu.virtual import control


def test_beside_a_real_gpu(two, monkeypatch):
    def no_such_gpu(index: int) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_such_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = nn.DataParallel(nn.Linear(2, 2).to(two[0]))
    assert model(torch.ones(4, 2)).shape == (4, 2)
    assert model.device_ids == [0, 1]


@pytest.mark.parametrize(("count", "on_host"), [(2, True), (3, False)])
def test_it_equals_the_serial_run(count, on_host):
    """The rows are unequal parts, of the host or of the first GPU; a gradient is sparse."""
    torch.manual_seed(0)
    layers = nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2), nn.BatchNorm1d(2)
    serial = nn.Sequential(*layers).double().eval()
    words = torch.tensor([[1, 2], [3, 4], [5, 6], [1, 3], [7, 8]])
    with control.running(count) as devices:
        model = copy.deepcopy(serial).to(devices[0])
        parallel = nn.DataParallel(model, [device.index for device in devices])
        out = parallel(words if on_host else words.to(devices[0]))
        assert out.device == devices[0]
        out.square().sum().backward()
        expected = serial(words)
        expected.square().sum().backward()
        assert torch.allclose(out.cpu(), expected, rtol=1e-12)
        assert model[0].weight.grad.is_sparse
        for one, other in zip(model.parameters(), serial.parameters(), strict=True):
            grad, right = one.grad.to_dense().cpu(), other.grad.to_dense()
            assert torch.allclose(grad, right, rtol=1e-12)


def test_an_error_in_a_replica_names_it(two):
    model = nn.DataParallel(nn.Linear(3, 2).to(two[0]))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0"):
        model(torch.ones(4, 5))
    model.module.to(two[1])
    with pytest.raises(
        RuntimeError, match="module must have its parameters and buffers on device vgpu:0"
    ):
        model(torch.ones(4, 3))
