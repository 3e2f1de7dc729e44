"""Simulated times follow the rules of sim/clock.py and sim/cost.py, and are the same in each
run."""

import itertools

import pytest
import torch
from compare_devices import CABLE, last, seconds
from torch import nn

from multigpu import LINKS, Gpu
from multigpu.virtual import control
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD, LAUNCH_OVERHEAD

PCIE = LINKS["PCIe3"]
KIB = 2**10


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        (torch.float32, 1e12),
        (torch.float64, 1e11),
        (torch.float16, 4e12),
        (torch.bfloat16, 4e12),
    ],
)
def test_a_matrix_product_is_bound_by_arithmetic_or_by_memory(dtype, peak):
    gpu = Gpu("x", 2**40, 1e12, 1e11, 1e12, 2e12, 4e12, "PCIe3")
    with control.running(count=1, gpu=gpu, compute=False) as (device,):
        n = 16384
        a = torch.empty(n, n, dtype=dtype, device=device)
        a @ a
        assert seconds(last()) == pytest.approx(KERNEL_OVERHEAD + 2 * n**3 / peak)
        thin = torch.empty(n, 1, dtype=dtype, device=device)
        a @ thin
        traffic = (n * n + 2 * n) * dtype.itemsize
        roofline = max(traffic / 1e12, 2 * n * n / peak)
        assert seconds(last()) == pytest.approx(KERNEL_OVERHEAD + roofline)


def test_flops_of_a_convolution_and_its_derivatives():
    tf32 = 2e12
    gpu = Gpu("x", 2**40, 1e15, 1e11, 1e12, tf32, 4e12, "PCIe3")
    with control.running(count=1, gpu=gpu, compute=False) as (device,):
        layer = nn.Conv2d(16, 32, 3, padding=1, bias=False, device=device)
        x = torch.empty(8, 16, 64, 64, device=device, requires_grad=True)
        out = layer(x)
        forward = 2 * 8 * 32 * 64 * 64 * 16 * 9
        expected = KERNEL_OVERHEAD + forward / tf32
        assert seconds(last()) == pytest.approx(expected, rel=1e-6)
        out.backward(torch.empty_like(out))
        events = control.timeline().events
        backward = next(event for event in events if event.name == "convolution_backward")
        expected = KERNEL_OVERHEAD + 2 * forward / tf32
        assert seconds(backward) == pytest.approx(expected, rel=1e-6)


def test_the_host_continues_and_the_device_executes_in_order(gpus):
    first, _ = gpus
    x = torch.zeros(250_000, device=first)
    start = control.elapsed()
    for _ in range(3):
        # 1 MB read and 1 MB written: 2 ms each, launched within 30 µs.
        x.add_(1)
    host = machine.current().clock.main_thread.time
    assert host - start == pytest.approx(3 * LAUNCH_OVERHEAD)
    events = control.timeline(since=start).events
    assert [seconds(event) for event in events] == pytest.approx([2e-3 + KERNEL_OVERHEAD] * 3)
    assert events[0].start == pytest.approx(start + LAUNCH_OVERHEAD)
    assert events[1].start == events[0].end
    assert events[2].start == events[1].end
    assert control.elapsed() == events[2].end


def test_indices_do_not_make_the_host_wait_and_masks_do(gpus):
    x = torch.zeros(250_000, device=gpus[0])
    indices = torch.arange(3, device=gpus[0])
    mask = x > 0
    clock = machine.current().clock
    x.add_(1)
    x[indices]
    assert clock.main_thread.time < clock.busy_until(0) - 1e-3
    x[mask]
    assert clock.main_thread.time > clock.busy_until(0) - 1e-3


def test_views_take_no_time(gpus):
    x = torch.zeros(4, 4, device=gpus[0])
    before = control.elapsed()
    views = [x.view(16), x.t(), x[1:], x.detach(), x.expand(2, 4, 4)]
    assert len(views) == 5
    assert control.elapsed() == before


def test_transfers(gpus):
    first, second = gpus
    megabyte = torch.zeros(250_000)
    before = control.elapsed()
    x = megabyte.to(first)
    upload = last("transfer")
    assert upload.name == "host → vgpu:0"
    # Pageable memory: 10 GB/s.
    assert seconds(upload) == pytest.approx(PCIE.latency + 1e-4)
    assert upload.start == pytest.approx(before + LAUNCH_OVERHEAD)
    # The host waits for a copy from pageable memory.
    assert machine.current().clock.main_thread.time == upload.end
    x.add_(1)
    y = x.to(second)
    across = last("transfer")
    assert across.name == "vgpu:0 → vgpu:1"
    assert seconds(across) == pytest.approx(1e-3 + 1e-3)
    assert across.start == last().end, "it starts when its source is ready"
    y.add_(1)
    assert last().start == across.end, "later work of the destination waits"
    x.add_(1)
    assert last().device == 0
    assert last().start == across.end, "later work of the source waits"
    y.cpu()
    assert last("transfer").name == "vgpu:1 → host"


def test_non_blocking_lets_the_host_continue_if_the_memory_is_pinned(gpus):
    clock = machine.current().clock
    data = torch.zeros(250_000)
    data.to(gpus[0], non_blocking=True)
    # The host waits for a copy from pageable memory.
    assert clock.main_thread.time == clock.busy_until(0)
    pinned = data.pin_memory()
    before = clock.main_thread.time
    assert pinned.is_pinned()
    assert pinned[5:].is_pinned()
    assert not data.is_pinned()
    assert pinned.pin_memory() is pinned
    pinned.to(gpus[0], non_blocking=True)
    assert clock.main_thread.time == pytest.approx(before + LAUNCH_OVERHEAD)
    assert clock.busy_until(0) > clock.main_thread.time
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch\.vgpu\.FloatTensor'"):
        data.to(gpus[0]).pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(4, device=gpus[0], pin_memory=True)


def test_threads_have_host_clocks_of_their_own_and_share_pythons_lock(gpus):
    """Two replicas' threads start at the main thread's time, and each pays for both threads.

    The main thread waits for the later one.
    """
    from threading import Thread

    x = torch.zeros(10, device=gpus[0])
    clock = machine.current().clock
    start = control.elapsed()
    clock.num_replica_threads = 2
    threads = [
        Thread(target=lambda n=n: [x.detach().add(1) for _ in range(n)]) for n in (3, 5)
    ]
    for thread in threads:
        # One after the other in real time, both from the same simulated time.
        thread.start()
        thread.join()
    assert clock.main_thread.time == start
    x.add(1)
    assert clock.main_thread.time == pytest.approx(start + (5 * 2 + 1) * LAUNCH_OVERHEAD)


def test_backward_has_a_host_thread_for_each_device(gpus):
    """As in autograd for GPUs: two launch-bound backward passes at once take the time of
    one."""
    weights = [torch.ones(10, device=device, requires_grad=True) for device in gpus]

    def backward_seconds(outs):
        loss = sum(out.sum().to(gpus[0]) for out in outs)
        start = control.elapsed()
        loss.backward()
        return control.elapsed() - start

    def chain(weight):
        out = weight
        for _ in range(50):
            out = out * 2
        return out

    backward_seconds([chain(weights[0])])
    one = backward_seconds([chain(weights[0])])
    both = backward_seconds([chain(weight) for weight in weights])
    assert one > 50 * LAUNCH_OVERHEAD
    assert both < 1.3 * one + CABLE.latency * 2


def test_the_phases_of_a_step_and_of_a_step_that_raises():
    with control.running(count=1, memory="1MiB") as (device,):
        weight = torch.ones(100 * KIB, device=device, requires_grad=True)
        (weight[:2] * 2).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
        with pytest.raises(torch.OutOfMemoryError):
            torch.optim.Adam([weight]).step()
        weight.detach().add_(1)
        events = [event for event in control.timeline().events if event.kind == "compute"]
        phases = [phase for phase, _ in itertools.groupby(event.phase for event in events)]
        assert phases == ["forward", "backward", "update", "forward"]


def test_an_expanded_tensor_takes_less_time_than_a_dense_one(two):
    torch.ones(1, 1, 1, device=two[0]).expand(64, 1024, 1024).sum()
    expanded = seconds(last())
    torch.ones(64, 1024, 1024, device=two[0]).sum()
    assert expanded < 0.1 * seconds(last())


# ---- pinned memory ----


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: torch.empty(4, **options),
        lambda **options: torch.tensor([1.0], **options),
        lambda **options: torch.randn(3, **options),
    ],
)
def test_a_factory_makes_pinned_memory(two, make):
    assert make(pin_memory=True).is_pinned()
    assert make(pin_memory=True)[:1].is_pinned()
    assert not make(pin_memory=False).is_pinned()
    assert not make().is_pinned()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_host_waits_for_a_copy_into_memory_that_is_not_pinned(two, is_pinned):
    x = torch.ones(2**20, device=two[0])
    target = torch.empty(2**20, pin_memory=is_pinned)
    side = torch.vgpu.current_stream()
    target.copy_(x, non_blocking=True)
    assert side.query() is not is_pinned
    # A new tensor is pinned, as on CUDA.
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert not x.cpu().is_pinned()


@pytest.mark.parametrize("copy", ["to the GPU", "to the GPU, into a tensor", "back"])
def test_a_copy_of_pinned_memory_is_faster(copy):
    """64 MiB, in GB/s; measured on an H100: 54.4 and 54.5 pinned, 8.2 and 13.6 pageable."""
    found = {}
    for is_pinned in (True, False):
        with control.running(1, gpu="H100-80GB") as (gpu,):
            host = torch.empty(2**24, pin_memory=is_pinned)
            x = torch.empty(2**24, device=gpu)
            if copy == "back":
                host.copy_(x)
            elif copy == "to the GPU":
                host.to(gpu)
            else:
                x.copy_(host)
            found[is_pinned] = 2**26 / seconds(last("transfer")) / 1e9
    assert found[True] == pytest.approx(54.4, rel=0.02)
    assert 8.2 < found[False] < 13.6
