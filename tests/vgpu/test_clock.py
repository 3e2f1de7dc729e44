"""Points 4, 5 and 7: simulated time follows its rules, is the same in each run, and its pictures say what they show."""

import pytest
import torch
from beside import CABLE, ROUND, last, pipeline
from torch import nn

from multigpu import vgpu
from multigpu.vgpu import GPUS, LINKS, Gpu, Link
from multigpu.vgpu.sim.clock import Event
from multigpu.vgpu.sim.network import ring_seconds
from multigpu.vgpu.sim.presets import KERNEL_OVERHEAD, LAUNCH_OVERHEAD

PCIE = LINKS["PCIe3"]


@pytest.fixture
def round_gpus():
    with vgpu.running(count=2, gpu=ROUND, link=CABLE) as devices:
        yield devices


def seconds(event: Event) -> float:
    return event.end - event.start


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
    with vgpu.running(
        count=1, gpu=Gpu("x", 2**40, 1e12, 1e11, 1e12, 2e12, 4e12, "PCIe3"), compute=False
    ) as (device,):
        n = 16384
        a = torch.empty(n, n, dtype=dtype, device=device)
        a @ a
        assert seconds(last()) == pytest.approx(KERNEL_OVERHEAD + 2 * n**3 / peak)
        thin = torch.empty(n, 1, dtype=dtype, device=device)
        a @ thin
        traffic = (n * n + 2 * n) * dtype.itemsize
        assert seconds(last()) == pytest.approx(
            KERNEL_OVERHEAD + max(traffic / 1e12, 2 * n * n / peak)
        )


def test_flops_of_a_convolution_and_its_derivatives():
    with vgpu.running(
        count=1, gpu=Gpu("x", 2**40, 1e15, 1e11, 1e12, 2e12, 4e12, "PCIe3"), compute=False
    ) as (device,):
        layer = nn.Conv2d(16, 32, 3, padding=1, bias=False, device=device)
        x = torch.empty(8, 16, 64, 64, device=device, requires_grad=True)
        out = layer(x)
        forward = 2 * 8 * 32 * 64 * 64 * 16 * 9
        assert seconds(last()) == pytest.approx(
            KERNEL_OVERHEAD + forward / 2e12, rel=1e-6
        )  # TF32
        out.backward(torch.empty_like(out))
        events = [
            event for event in vgpu.timeline().events if event.name == "convolution_backward"
        ]
        assert seconds(events[0]) == pytest.approx(
            KERNEL_OVERHEAD + 2 * forward / 2e12, rel=1e-6
        )


def test_the_host_goes_on_and_the_device_runs_in_order(round_gpus):
    first, _ = round_gpus
    x = torch.zeros(250_000, device=first)  # 1 MB written, 1 ms
    start = vgpu.elapsed()
    for _ in range(3):
        x.add_(1)  # 1 MB read, 1 MB written: 2 ms each, launched within 30 µs
    host = vgpu._current().clock.main.time
    assert host - start == pytest.approx(3 * LAUNCH_OVERHEAD)
    events = vgpu.timeline(since=start).events
    assert [seconds(event) for event in events] == pytest.approx([2e-3 + KERNEL_OVERHEAD] * 3)
    assert events[0].start == pytest.approx(start + LAUNCH_OVERHEAD)
    assert events[1].start == events[0].end and events[2].start == events[1].end
    assert vgpu.elapsed() == events[2].end


def test_item_cpu_and_synchronize_make_the_host_wait(round_gpus):
    first, second = round_gpus
    clock = vgpu._current().clock
    x = torch.zeros(250_000, device=first)
    assert clock.main.time < clock.free[0]
    torch.vgpu.synchronize(second)
    assert clock.main.time < clock.free[0]
    torch.vgpu.synchronize(first)
    assert clock.main.time == clock.free[0]
    for wait in (
        lambda: x[0].item(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
        lambda: bool((x == 0).all()),
    ):
        x.add_(1)
        busy_until = clock.free[0]
        wait()
        assert clock.main.time >= busy_until


def test_indices_do_not_make_the_host_wait_and_masks_do(round_gpus):
    x = torch.zeros(250_000, device=round_gpus[0])
    indices, mask, clock = torch.arange(3, device=round_gpus[0]), x > 0, vgpu._current().clock
    x.add_(1)
    x[indices]
    assert clock.main.time < clock.free[0] - 1e-3
    x[mask]
    assert clock.main.time > clock.free[0] - 1e-3


def test_a_launch_bound_device_idles(round_gpus):
    x = torch.zeros(10, device=round_gpus[0])
    start = vgpu.elapsed()
    for _ in range(100):
        x.add_(1)
    assert vgpu.elapsed() - start == pytest.approx(100 * LAUNCH_OVERHEAD, rel=0.05)
    assert vgpu.timeline(since=start).busy(0) == pytest.approx(
        KERNEL_OVERHEAD / LAUNCH_OVERHEAD, rel=0.1
    )


def test_views_take_no_time(round_gpus):
    x = torch.zeros(4, 4, device=round_gpus[0])
    before = vgpu.elapsed()
    x.view(16), x.t(), x[1:], x.detach(), x.expand(2, 4, 4)
    assert vgpu.elapsed() == before


def test_transfers(round_gpus):
    first, second = round_gpus
    data = torch.zeros(250_000)  # 1 MB
    before = vgpu.elapsed()
    x = data.to(first)
    there = last("transfer")
    assert there.name == "host → vgpu:0" and seconds(there) == pytest.approx(
        PCIE.latency + 1e6 / PCIE.bandwidth
    )
    assert there.start == pytest.approx(before + LAUNCH_OVERHEAD)
    assert (
        vgpu._current().clock.main.time == there.end
    )  # the host waits for a copy from pageable memory
    x.add_(1)
    y = x.to(second)
    across = last("transfer")
    assert across.name == "vgpu:0 → vgpu:1" and seconds(across) == pytest.approx(1e-3 + 1e-3)
    assert across.start == last().end  # when its source is ready
    y.add_(1)
    assert last().start == across.end  # what the destination runs later waits
    x.add_(1)
    assert last().device == 0 and last().start == across.end  # and what the source runs later
    y.cpu()
    assert last("transfer").name == "vgpu:1 → host"


def test_non_blocking_lets_the_host_go_on_if_the_memory_is_pinned(round_gpus):
    clock, data = vgpu._current().clock, torch.zeros(250_000)
    data.to(round_gpus[0], non_blocking=True)  # from pageable memory: the host waits
    assert clock.main.time == clock.free[0]
    pinned, before = data.pin_memory(), clock.main.time
    assert (
        pinned.is_pinned()
        and pinned[5:].is_pinned()
        and not data.is_pinned()
        and pinned.pin_memory() is pinned
    )
    pinned.to(round_gpus[0], non_blocking=True)
    assert (
        clock.main.time == pytest.approx(before + LAUNCH_OVERHEAD)
        and clock.free[0] > clock.main.time
    )
    with pytest.raises(RuntimeError, match="cannot pin 'vgpu'"):
        data.to(round_gpus[0]).pin_memory()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_that_pins(two, workers):
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    for x, y in DataLoader(data, 3, pin_memory=True, num_workers=workers):
        assert x.is_pinned() and torch.equal(x.to(two[0], non_blocking=True).cpu(), y.float())


def test_one_copy_engine_carries_one_transfer_at_a_time(round_gpus):
    first, second = round_gpus
    a, b = torch.zeros(250_000, device=first), torch.zeros(250_000, device=first)
    a.to(second), b.to(second)
    one, two = [event for event in vgpu.timeline().events if event.kind == "transfer"]
    assert two.start == one.end


def test_two_devices_work_at_the_same_time(round_gpus):
    parts = [torch.zeros(2_500_000, device=device) for device in round_gpus]
    start = vgpu.elapsed()
    for part in parts:
        part.add_(1)
    timeline = vgpu.timeline(since=start)
    assert timeline.busy(0) > 0.95 and timeline.busy("vgpu:1") > 0.95


def test_phases(round_gpus):
    model = nn.Linear(4, 4).to(round_gpus[0])
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device=round_gpus[0])).sum().backward()
    update.step()
    phases = [event.phase for event in vgpu.timeline().events if event.kind == "compute"]
    assert set(phases) == {"forward", "backward", "update"}
    assert sorted(phases, key=["forward", "backward", "update"].index) == phases


def test_naive_model_parallelism_blocks_and_micro_batches_overlap():
    with vgpu.running(count=2, compute=False) as devices:
        naive = pipeline(devices, 1)
    with vgpu.running(count=2, compute=False) as devices:
        piped = pipeline(devices, 4)
    assert naive.busy(0) + naive.busy(1) < 1.02  # never both at once
    # The bubble of p = 2 stages and m = 4 micro-batches: each is busy m / (m + p − 1) of the time that the transfers leave.
    for device in (0, 1):
        assert piped.busy(device) == pytest.approx(
            4 / 5 * (1 - piped.busy(device, "transfer")), abs=0.03
        )
    assert piped.end - piped.start < naive.end - naive.start


def test_times_are_the_same_in_each_run_and_without_numbers():
    runs = []
    for compute in (True, False):  # with numbers and without
        with vgpu.running(count=2, compute=compute) as devices:
            pipeline(devices, 4)
            runs.append((vgpu.elapsed(), vgpu.timeline().events))
    assert runs[0] == runs[1]


def test_ring_times():
    link = Link("x", 1e9, 1e-5)
    assert ring_seconds("allreduce", 10**6, 4, link) == pytest.approx(6 * (1e-5 + 0.25e-3))
    assert ring_seconds("allgather", 10**6, 4, link) == pytest.approx(3 * (1e-5 + 0.25e-3))
    assert ring_seconds("broadcast", 10**6, 4, link) == pytest.approx(3e-5 + 1e-3)
    assert ring_seconds("allreduce", 10**6, 1, link) == 0


def test_presets_are_the_sheets_figures():
    v100, a100, h100 = GPUS["V100-16GB"], GPUS["A100-40GB"], GPUS["H100-80GB"]
    assert (v100.memory, v100.bandwidth, v100.fp32, v100.fp16) == (
        2**34,
        900e9,
        15.7e12,
        125e12,
    )
    assert (a100.bandwidth, a100.fp32, a100.tf32, a100.fp16) == (
        1555e9,
        19.5e12,
        156e12,
        312e12,
    )
    assert (GPUS["A100-80GB"].memory, GPUS["A100-80GB"].bandwidth) == (80 * 2**30, 2039e9)
    assert (h100.bandwidth, h100.fp64, h100.fp32) == (3350e9, 34e12, 67e12)
    assert [LINKS[name].bandwidth for name in ("NVLink2", "NVLink3", "NVLink4")] == [
        150e9,
        300e9,
        450e9,
    ]
    assert LINKS["PCIe4"].bandwidth == 2 * LINKS["PCIe3"].bandwidth and set(LINKS) >= {
        "PCIe3",
        "PCIe4",
        "PCIe5",
    }


def test_threads_have_host_clocks_of_their_own_and_share_pythons_lock(round_gpus):
    """Two replicas' threads start at the main thread's time and each pays for both; the main thread waits for the later."""
    from threading import Thread

    x = torch.zeros(10, device=round_gpus[0])
    clock, start = vgpu._current().clock, vgpu.elapsed()
    clock.sharing = 2
    threads = [
        Thread(target=lambda n=n: [x.detach().add(1) for _ in range(n)]) for n in (3, 5)
    ]
    for thread in threads:
        thread.start()
        thread.join()  # one after the other, and still both at the same simulated time
    assert clock.main.time == start
    x.add(1)
    assert clock.main.time == pytest.approx(start + (5 * 2 + 1) * LAUNCH_OVERHEAD)


def test_backward_has_a_host_thread_for_each_device(round_gpus):
    """As autograd has for GPUs: two launch-bound backward passes at once take the time of one."""
    weights = [torch.ones(10, device=device, requires_grad=True) for device in round_gpus]

    def backward(which):
        loss = sum(out.sum().to(round_gpus[0]) for out in which)
        start = vgpu.elapsed()
        loss.backward()
        return vgpu.elapsed() - start

    def chain(weight):
        out = weight
        for _ in range(50):
            out = out * 2
        return out

    backward([chain(weights[0])])
    one, both = backward([chain(weights[0])]), backward([chain(weight) for weight in weights])
    assert one > 50 * LAUNCH_OVERHEAD and both < 1.3 * one + CABLE.latency * 2
