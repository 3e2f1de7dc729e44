"""DataParallel runs unmodified on virtual GPUs, and equals the serial run."""

import copy

import pytest
import torch
from beside import difference
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import comm

from multigpu import vgpu
from multigpu.models import CNN


def batch(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    return torch.randn(n, 1, 8, 8, generator=source, dtype=torch.double), torch.randint(
        0, 10, (n,), generator=source
    )


def data_parallel(
    devices: list, steps: int = 3, on_host: bool = True
) -> tuple[nn.Module, nn.Module]:
    """The CNN, trained serially on the CPU and with DataParallel on the devices."""
    torch.manual_seed(0)
    plain = CNN().double()
    there = copy.deepcopy(plain).to(devices[0])
    x, y = batch()
    for model, first in (
        (plain, torch.device("cpu")),
        (nn.DataParallel(there, [d.index for d in devices]), devices[0]),
    ):
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            out = model(x if on_host else x.to(first))
            assert out.device == first
            update.zero_grad()
            F.cross_entropy(out, y.to(first)).backward()
            update.step()
    return plain, there


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_data_parallel_equals_the_serial_run(count, on_host):
    with vgpu.running(count=count) as devices:
        assert difference(*data_parallel(devices, on_host=on_host)) <= 1e-15


def test_data_parallel_without_the_sum_of_gradients_differs(two, monkeypatch):
    """What the equality stands on: the gradients of the replicas are added up."""
    monkeypatch.setattr(
        comm, "reduce_add_coalesced", lambda inputs, destination=None: tuple(inputs[0])
    )
    assert difference(*data_parallel(two)) > 1e-3


def test_data_parallel_splits_and_loses_the_replicas_state(two):
    seen = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(1)), 0

        def forward(self, x):
            self.calls += 1
            seen.append((str(x.device), len(x), str(self.weight.device)))
            return x * self.weight

    model = Counting().to(two[0])
    out = nn.DataParallel(model)(torch.ones(5, 2))
    assert sorted(seen) == [("vgpu:0", 3, "vgpu:0"), ("vgpu:1", 2, "vgpu:1")]
    assert model.calls == 0 and out.shape == (5, 2) and out.device == two[0]


def test_data_parallel_is_deterministic_with_dropout_and_in_time():
    """The replicas run in threads: neither the random numbers nor the simulated times depend on which comes first."""
    results = set()
    for _ in range(3):
        with vgpu.running(count=2) as devices:
            torch.manual_seed(0)
            model = nn.DataParallel(
                nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4)).to(
                    devices[0]
                )
            )
            loss = model(torch.ones(6, 8)).square().mean()
            loss.backward()
            events = tuple(
                (e.device, e.kind, e.phase, e.name, e.start, e.end)
                for e in vgpu.timeline().events
            )
            results.add((loss.item(), vgpu.elapsed(), events))
    assert len(results) == 1


def test_an_error_in_a_replica_names_it(two):
    model = nn.DataParallel(nn.Linear(3, 2).to(two[0]))
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0 on device 0"):
        model(torch.ones(4, 5))
    model.module.to(two[1])
    with pytest.raises(
        RuntimeError, match="module must have its parameters and buffers on device vgpu:0"
    ):
        model(torch.ones(4, 3))


def test_comm_functions(two):
    x = torch.arange(6.0, device=two[0])
    copies = comm.broadcast(x, [0, 1])
    assert [str(copy.device) for copy in copies] == ["vgpu:0", "vgpu:1"] and copies[
        1
    ].tolist() == x.tolist()
    target = torch.zeros(6, device=two[1])
    assert comm.broadcast(x, out=[target])[0] is target and target.tolist() == x.tolist()
    with pytest.raises(RuntimeError, match="Exactly one of 'devices' and 'out'"):
        comm.broadcast(x)
    pieces = comm.scatter(x, [0, 1], chunk_sizes=[4, 2])
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5]] and pieces[
        1
    ].device == two[1]
    assert comm.gather(pieces, destination=1).tolist() == x.tolist()
    assert comm.gather(pieces, destination=-1).device.type == "cpu"
    sums = comm.reduce_add_coalesced([[x, x.half()], [copies[1], copies[1].half()]], 1)
    assert [total.dtype for total in sums] == [torch.float32, torch.float16] and sums[
        0
    ].device == two[1]
    assert sums[0].tolist() == [0, 2, 4, 6, 8, 10] == sums[1].tolist()
    assert comm.broadcast_coalesced([x, x.half()], [0, 1])[1][1].dtype is torch.float16
