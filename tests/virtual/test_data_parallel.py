"""DataParallel runs unmodified on virtual GPUs, and equals the serial run."""

import copy

import pytest
import torch
from compare_devices import difference
from torch import nn
from torch.nn import functional as F

from multigpu.models import CNN
from multigpu.virtual import control


def batch(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    x = torch.randn(n, 1, 8, 8, generator=source, dtype=torch.double)
    y = torch.randint(0, 10, (n,), generator=source)
    return x, y


def data_parallel(
    devices: list, steps: int = 3, on_host: bool = True
) -> tuple[nn.Module, nn.Module]:
    """The CNN, trained serially on the CPU and with DataParallel on the devices."""
    torch.manual_seed(0)
    serial = CNN().double()
    model = copy.deepcopy(serial).to(devices[0])
    parallel = nn.DataParallel(model, [device.index for device in devices])
    train(serial, torch.device("cpu"), steps, on_host)
    train(parallel, devices[0], steps, on_host)
    return serial, model


def train(model: nn.Module, device: torch.device, steps: int, on_host: bool) -> None:
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        out = model(x if on_host else x.to(device))
        assert out.device == device
        optimizer.zero_grad()
        F.cross_entropy(out, y.to(device)).backward()
        optimizer.step()


@pytest.mark.parametrize(("count", "on_host"), [(2, True), (3, False)])
def test_data_parallel_equals_the_serial_run(count, on_host):
    with control.running(count=count) as devices:
        assert difference(*data_parallel(devices, on_host=on_host)) <= 1e-15


def test_beside_a_real_gpu(two, monkeypatch):
    def no_such_gpu(index: int) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_such_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    model = nn.DataParallel(nn.Linear(2, 2).to(two[0]))
    assert model(torch.ones(4, 2)).shape == (4, 2)
    assert model.device_ids == [0, 1]


def test_sparse_gradients_are_added_up(two):
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    model = copy.deepcopy(serial).to(two[0])
    words = torch.tensor([[1, 2], [3, 4], [5, 6], [1, 3]])
    serial(words).sum().backward()
    nn.DataParallel(model)(words).sum().backward()
    assert model[0].weight.grad.is_sparse
    assert torch.equal(model[0].weight.grad.to_dense().cpu(), serial[0].weight.grad.to_dense())
    torch.testing.assert_close(model[2].weight.grad.cpu(), serial[2].weight.grad)


def test_an_error_in_a_replica_names_it(two):
    model = nn.DataParallel(nn.Linear(3, 2).to(two[0]))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0"):
        model(torch.ones(4, 5))
    model.module.to(two[1])
    with pytest.raises(
        RuntimeError, match="module must have its parameters and buffers on device vgpu:0"
    ):
        model(torch.ones(4, 3))
