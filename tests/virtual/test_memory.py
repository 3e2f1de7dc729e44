"""The memory meter counts what a GPU would allocate, frees at once, and runs out as a GPU
does; a storage has an address and a size."""

import copy
import signal
import sys

import pytest
import torch
from compare_devices import difference
from torch import nn

from multigpu.virtual import control
from multigpu.virtual.sim import memory

KIB = 2**10
MIB = 2**20


@pytest.fixture
def small():
    """Two devices of 64 MiB."""
    with control.running(count=2, memory="64MiB") as devices:
        yield devices


def allocated(device: torch.device) -> int:
    return torch.vgpu.memory_allocated(device)


def test_views_share_and_keep_their_storage(small):
    x = torch.zeros(256, 1024, device=small[0])
    views = [
        x.view(-1),
        x.t(),
        x[3:5],
        x.detach(),
        x.expand(2, 256, 1024),
        *x.chunk(4),
        x.unsqueeze(0).permute(2, 1, 0),
        x.reshape(512, 512),
    ]
    assert allocated(small[0]) == MIB
    del x
    assert allocated(small[0]) == MIB
    del views
    assert allocated(small[0]) == 0


def test_in_place_and_out(small):
    x = torch.zeros(256, 1024, device=small[0])
    x.add_(1).mul_(2).clamp_(max=3)
    torch.add(x, x, out=x)
    assert allocated(small[0]) == MIB
    x.resize_(512, 1024)
    assert allocated(small[0]) == 2 * MIB
    x.data = torch.zeros(128, 1024, device=small[0])
    assert allocated(small[0]) == MIB // 2
    x.set_(torch.zeros(64, 1024, device=small[0]))
    assert allocated(small[0]) == MIB // 4


def test_training_continues_after_out_of_memory_in_backward():
    """256 rows fit in forward and not in backward; after that, 8 rows train as on the CPU."""
    torch.manual_seed(0)
    on_cpu = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
    with control.running(count=1, memory="2800KiB") as (device,):
        model = copy.deepcopy(on_cpu).to(device)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        before = allocated(device)
        loss = model(torch.ones(256, 256, device=device)).square().mean()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        update.zero_grad()
        del loss
        assert allocated(device) == before
        assert torch.vgpu.max_memory_allocated(device) <= 2800 * KIB
        for place, net in ((device, model), ("cpu", on_cpu)):
            net(torch.ones(8, 256, device=place)).square().mean().backward()
        update.step()
        torch.optim.SGD(on_cpu.parameters(), lr=0.1).step()
        assert difference(model, on_cpu) == 0


def test_the_hosts_memory_can_be_filled_by_small_tensors(monkeypatch):
    """The devices' memory may exceed the host's, but what is used may not."""
    with control.running(count=2, gpu="H100-80GB") as (_, second):
        monkeypatch.setattr(memory, "host_memory", lambda: 65 * MIB)
        kept = [torch.zeros(8 * MIB // 4, device=second) for _ in range(10)]
        monkeypatch.setattr(memory, "host_memory", lambda: 63 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"host.* on vgpu:1.* 63.00 MiB"):
            kept += [torch.zeros(8 * MIB // 4, device=second) for _ in range(10)]
        assert allocated(second) == 10 * 8 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(8 * MIB // 4, device=second)
        monkeypatch.setattr(memory, "host_memory", lambda: 65 * MIB)
        torch.zeros(8 * MIB // 4, device=second)


def test_the_hosts_memory_is_checked_before_a_large_tensor_is_made(monkeypatch):
    """A virtual GPU's numbers are in the host's memory."""
    with control.running(count=2, gpu="H100-80GB") as (first, _):
        monkeypatch.setattr(memory, "host_memory", lambda: 100 * MIB)
        words = r"host.* 200.00 MiB on vgpu:0.* 100.00 MiB .*compute=False"
        with pytest.raises(torch.OutOfMemoryError, match=words):
            torch.zeros(200 * MIB // 4, device=first)
        with pytest.raises(torch.OutOfMemoryError, match=words):
            torch.empty(200 * MIB, dtype=torch.uint8).to(first)
        assert allocated(first) == 0
    with control.running(count=1, gpu="H100-80GB", compute=False) as (device,):
        assert allocated(device) == 0
        keep = torch.zeros(2**30, 16, device=device)
        assert allocated(device) == 2**36
        assert keep.shape == (2**30, 16)


def test_memory_by_category(small):
    """Weights, gradients, optimizer state and activations add up; tied weights count once."""
    model = nn.Sequential(
        nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 256, bias=False)
    ).to(small[0])
    model[2].weight = model[0].weight
    # A buffer on the same storage.
    model.register_buffer("alias", model[0].weight.detach())
    update = torch.optim.Adam(model.parameters())
    nbytes = 256 * KIB
    held = control.memory_held(model, update)[small[0]]
    assert held["weights"] == sum(held.values()) == nbytes
    x = torch.zeros(128, 256, device=small[0])
    out = model(x).sum()
    after_forward = control.memory_held(model, update)
    # The input, tanh's output (which backward needs), and the sum, which takes 512 bytes.
    assert after_forward[small[0]]["activations"] == 2 * 128 * KIB + 512
    out.backward()
    update.step()
    now = control.memory_held(model, update)[small[0]]
    assert now["weights"] == now["gradients"] == nbytes
    assert now["optimizer"] == 2 * nbytes
    assert sum(now.values()) == allocated(small[0])
    assert control.memory_held(model)[small[1]] == dict.fromkeys(now, 0)


def test_a_ctrl_c_is_not_lost_while_tensors_are_deleted(small):
    """Python drops an exception that is raised in a __del__, so tensors may have none."""

    class Alarm(BaseException):
        pass

    def ring(*_):
        raise Alarm

    lost = []
    received = 0
    before = signal.signal(signal.SIGALRM, ring)
    hook = sys.unraisablehook
    sys.unraisablehook = lost.append
    try:
        for turn in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + turn * 1e-6)
                for _ in range(2000):
                    torch.empty(4, device=small[0])
            except Alarm:
                received += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
    assert received == 300
    assert not lost


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_tensor_is_unchanged_if_its_new_size_does_not_fit():
    with control.running(count=1, memory="1MiB") as (device,):
        x = torch.arange(6.0, device=device)
        y = torch.arange(2.0, device=device)
        view = x[2:4]
        big = torch.ones(150 * KIB, device=device)
        before = allocated(device)
        for call in (
            lambda: x.resize_(300 * KIB),
            lambda: view.resize_(300 * KIB),
            lambda: torch.add(big, 1, out=y),
            lambda: torch.cat([big, big], out=y),
            lambda: torch.sort(big, out=(y, y.long())),
        ):
            with pytest.raises(torch.OutOfMemoryError):
                call()
            assert x.tolist() == [0, 1, 2, 3, 4, 5]
            assert view.tolist() == [2, 3]
            assert y.tolist() == [0, 1]
            assert x.shape == (6,)
            assert y.shape == (2,)
            assert allocated(device) == before
        assert torch.add(x, 1, out=y).tolist() == [1, 2, 3, 4, 5, 6]
        assert y.shape == (6,)
    with control.running(count=1, memory="1MiB", compute=False) as (device,):
        x = torch.ones(2, device=device)
        for call in (
            lambda: x.resize_(300 * KIB),
            lambda: torch.cat([x.expand(300 * KIB, 2)], out=x),
        ):
            with pytest.raises(torch.OutOfMemoryError):
                call()
            assert x.shape == (x + 1).shape == (2,)
            assert allocated(device) == 512


def test_a_kernel_that_the_host_has_no_memory_for(two):
    x = torch.ones(1_000_000, device=two[0])
    with pytest.raises(torch.OutOfMemoryError):
        x[:, None] * x[None, :]


@pytest.mark.parametrize(
    ("operation", "times"),
    [(torch.softmax, 2), (torch.log_softmax, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_of_softmax_has_a_temporary(small, operation, times, dtype):
    """As on an H100: benchmarks/gpu."""
    first, _ = small
    x = torch.zeros(256, 1024, device=first, dtype=dtype, requires_grad=True)
    out = operation(x, 1)
    gradient = torch.ones_like(out)
    before = allocated(first)
    torch.vgpu.reset_peak_memory_stats(first)
    out.backward(gradient)
    assert torch.vgpu.max_memory_allocated(first) - before == times * x.nbytes
    assert allocated(first) - before == x.nbytes
    large = torch.zeros(18 * MIB // 4, device=first, requires_grad=True)
    out = operation(large, 0)
    if times == 2:
        with pytest.raises(torch.OutOfMemoryError):
            out.backward(out.detach())
    else:
        out.backward(out.detach())


# ---- storages ----


def test_each_storage_has_an_address_and_views_have_an_offset(two):
    x = torch.ones(4, 8, device=two[0])
    y = torch.ones(4, 8, device=two[0])
    z = torch.ones(4, 8, device=two[1])
    addresses = [tensor.data_ptr() for tensor in (x, y, z)]
    assert len({0, *addresses}) == 4
    assert abs(addresses[0] - addresses[1]) >= x.nbytes, "the storages do not overlap"
    assert addresses == [tensor.data_ptr() for tensor in (x, y, z)]
    assert x[1:].data_ptr() == x.data_ptr() + 32
    assert x.detach().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr()
    assert torch.empty(0, device=two[0]).data_ptr() == 0
    x.add_(1)
    assert x.data_ptr() == addresses[0]


def test_a_storage_belongs_to_the_device(two):
    x = torch.arange(4.0, device=two[1])
    storage = x.untyped_storage()
    assert storage.nbytes() == storage.size() == 16
    assert storage.device == two[1]
    assert x.view(2, 2).untyped_storage() is storage
    assert isinstance(storage, torch.UntypedStorage)
    assert x._typed_storage().device == two[1]
    copied = storage.cpu()
    assert copied.device.type == "cpu"
    assert copied.nbytes() == 16


@pytest.mark.parametrize("compute", [True, False])
def test_resizing_a_storage_to_nothing_frees_its_memory(compute):
    with control.running(count=1, memory="65KiB", compute=compute) as (device,):
        x = torch.ones(4 * KIB, device=device)
        view = x.view(2, -1)[1]
        storage = x.untyped_storage()
        storage.resize_(0)
        assert torch.vgpu.memory_allocated() == 0
        assert storage.nbytes() == 0
        assert storage.data_ptr() == x.data_ptr() == 0
        other = torch.ones(12 * KIB, device=device)
        for use in (x.sum, x.cpu, lambda: other[: 4 * KIB].copy_(x), lambda: view.add_(1)):
            with pytest.raises(RuntimeError, match="has been resized to 0 bytes"):
                use()
        assert other.sum().item() == 12 * KIB if compute else True
        storage.resize_(x.nbytes)
        assert torch.vgpu.memory_allocated() == 64 * KIB
        assert x.data_ptr() == view.data_ptr() - 8 * KIB != 0
        x.fill_(3)
        if compute:
            assert view.sum().item() == 3 * 2 * KIB
