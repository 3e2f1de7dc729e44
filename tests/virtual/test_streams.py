"""Streams and events: what is in order, what overlaps, what waits, and who waits."""

import itertools
import random

import pytest
import torch
from compare_devices import last, seconds
from torch.utils.checkpoint import checkpoint

from multigpu.virtual import control
from multigpu.virtual.sim import machine
from multigpu.virtual.sim.notes import take_events
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD, LAUNCH_OVERHEAD
from multigpu.virtual.sim.streams import INTERRUPTED, Engine

# `x.add_(1)` on a megabyte: read and written at 1 GB/s.
ADD = 2e-3 + KERNEL_OVERHEAD


def megabyte(device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(250_000, device=device)


def test_backward_of_work_on_a_side_stream(gpus):
    """Its numbers are right, and a hook has its caller's stream and can set others."""
    first, second = gpus
    own, sides = torch.vgpu.current_stream(first), [torch.vgpu.Stream(gpu) for gpu in gpus]
    w = torch.full((4,), 2.0, device=first, requires_grad=True)
    with torch.vgpu.stream(sides[0]), torch.vgpu.stream(sides[1]):
        there = checkpoint(torch.square, w, use_reentrant=False).to(second)
    torch.vgpu.current_stream(second).wait_stream(sides[1])
    seen = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        seen.append(torch.vgpu.current_stream(first))
        with sides[0]:
            seen.append(torch.vgpu.current_stream(first))
            return grad * 10

    w.register_hook(hook)
    (there * 3).sum().backward()
    w.grad.add_(1)
    assert last().stream == 0 and last().start >= last("transfer").end
    assert seen == [own, sides[0]] and torch.vgpu.current_stream(first) == own
    assert w.grad.tolist() == [121.0] * 4


# ---- copies ----


def test_a_copy_on_a_side_stream_overlaps_until_a_stream_waits_for_it(gpus):
    first, _ = gpus
    x = megabyte(first)
    data = megabyte().pin_memory()
    own = torch.vgpu.current_stream(first)
    side = torch.vgpu.Stream(first)
    for stream, overlaps in ((side, True), (own, False), (None, False)):
        torch.vgpu.synchronize(first)
        x.add_(1)
        with torch.vgpu.stream(stream):
            assert torch.vgpu.current_stream(first) == (stream or own)
            data.to(first, non_blocking=True)
        assert (last("transfer").start < last().end) == overlaps
        assert torch.vgpu.current_stream(first) == own
    torch.vgpu.synchronize(first)
    with side:
        copy = torch.zeros(2_500_000).pin_memory().to(first, non_blocking=True)
    copy[:10].add_(1)
    assert last().start < last("transfer").end, "without wait_stream, nothing waits"
    own.wait_stream(side)
    copy[:10].add_(1)
    assert last().start == last("transfer").end


def test_a_copy_between_devices_is_on_the_current_streams_of_both(gpus):
    first, second = gpus
    x = megabyte(first)
    y = megabyte(second)
    side = torch.vgpu.Stream(first)
    side.wait_stream(torch.vgpu.current_stream(first))
    x.add_(1)
    busy = last()
    with side:
        x.to(second)
        copied = last("transfer")
        assert copied.start < busy.end, "the source's default stream is not asked"
        x.to(second)
        assert last("transfer").start == copied.end, "one copy at a time"
    y.add_(1)
    assert last().start == last("transfer").end, "the destination's stream waits"
    x.add_(1)
    assert last().start == busy.end, "the source's default stream continues"


def test_copies_in_one_direction_share_a_copy_engine(gpus):
    first, second = gpus
    sides = [torch.vgpu.Stream(device) for device in (first, first, second)]
    data = torch.zeros(2_500_000).pin_memory()
    x = megabyte(first)
    torch.vgpu.synchronize()
    for side in sides:
        with side:
            data.to(side.device, non_blocking=True)
    with torch.vgpu.Stream(first):
        x.to("cpu", non_blocking=True)
    events = [event for event in control.timeline().events if event.kind == "transfer"]
    (one, two), (other,), (back,) = (
        [event for event in events if event.name == name]
        for name in ("host → vgpu:0", "host → vgpu:1", "vgpu:0 → host")
    )
    assert two.start == one.end
    assert other.start < one.end and back.start < one.end


# ---- kernels ----


def test_kernels_of_two_streams_take_the_sum_of_their_times(gpus):
    """The device's SMs work on one kernel at a time."""
    x, y = megabyte(gpus[0]), megabyte(gpus[0])
    side = torch.vgpu.Stream(gpus[0])
    start = control.elapsed()
    for _ in range(3):
        x.add_(1)
        with side:
            y.add_(1)
    timeline = control.timeline(since=start)
    assert timeline.end - start == pytest.approx(6 * ADD + LAUNCH_OVERHEAD)
    assert {event.stream for event in timeline.events} == {0, side.stream_id}


def test_a_kernel_that_is_ready_earlier_uses_the_free_time(gpus):
    """The side stream waits for an upload. The kernel of the default stream, which is launched
    later, runs before, pauses for the side stream's kernel, and then continues."""
    first, _ = gpus
    x, y = torch.zeros(2_500_000, device=first), megabyte(first)
    data = torch.zeros(10_000_000).pin_memory()
    side = torch.vgpu.Stream(first)
    torch.vgpu.synchronize()
    with side:
        data.to(first, non_blocking=True)
        y.add_(1)
    waited = last()
    assert waited.start == last("transfer").end
    x.add_(1)
    long = last()
    assert long.start < waited.start < waited.end < long.end
    assert seconds(long) == pytest.approx(10 * 2e-3 + KERNEL_OVERHEAD + ADD)
    shares = control.timeline(since=long.start).busy(0)
    assert shares == pytest.approx(1)


def test_a_kernel_of_a_high_priority_interrupts(gpus):
    """As FSDP2's copies: it does not wait for kernels that were launched before it. They make
    up for the time after their end."""
    x, y = megabyte(gpus[0]), megabyte(gpus[0])
    high = torch.vgpu.Stream(gpus[0], priority=-1)
    start = control.elapsed()
    for _ in range(3):
        x.add_(1)
    queued = last()
    with high:
        y.mul_(2)
        y.mul_(2)
    urgent = last()
    assert urgent.start == pytest.approx(start + 4 * LAUNCH_OVERHEAD + ADD)
    assert urgent.stream == high.stream_id
    x.add_(1)
    assert last().start == pytest.approx(queued.end + 2 * ADD)
    timeline = control.timeline(since=start)
    assert timeline.end - start == pytest.approx(6 * ADD + LAUNCH_OVERHEAD)
    assert timeline.busy(0) == pytest.approx(1, abs=0.01)
    rest = [event for event in timeline.events if event.name == INTERRUPTED]
    assert sum(map(seconds, rest)) == pytest.approx(2 * ADD)


def test_work_that_was_launched_before_the_first_side_stream_has_the_sms(gpus):
    x, y = megabyte(gpus[0]), megabyte(gpus[0])
    torch.vgpu.synchronize()
    x.add_(1)
    busy = last()
    with torch.vgpu.Stream(gpus[0]):
        y.add_(1)
    assert last().start == busy.end


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_gives_each_work_the_time_that_the_earlier_ones_leave(seed):
    """Compared with a search, second by second."""
    source = random.Random(seed)
    engine = Engine()
    taken: set[int] = set()
    for _ in range(100):
        ready, length = source.randrange(300), source.randrange(1, 8)
        free = (second for second in itertools.count(ready) if second not in taken)
        own = list(itertools.islice(free, length))
        taken.update(own)
        assert engine.run(ready, length) == (own[0], own[-1] + 1)


# ---- the host ----


def test_the_host_waits_for_the_current_stream_only(gpus):
    """item(), copies to the host and nonzero() wait for the stream that they are on.

    Its high priority lets the kernel of nonzero() start while the SMs are busy.
    """
    first, _ = gpus
    x = torch.zeros(2_500_000, device=first)
    y = torch.zeros(10, device=first)
    side = torch.vgpu.Stream(first, priority=-1)
    done = torch.vgpu.Event()
    torch.vgpu.synchronize()
    x.sum()
    done.record()
    with side:
        for wait in (lambda: y[0].item(), y.cpu, y.nonzero, side.synchronize):
            wait()
            assert not done.query()
    assert not torch.vgpu.current_stream(first).query()
    torch.vgpu.synchronize(first)
    assert done.query() and torch.vgpu.current_stream(first).query()


def test_synchronising_a_device_waits_for_all_its_streams(gpus):
    x = megabyte(gpus[0])
    with torch.vgpu.Stream(gpus[0]) as side:
        x.add_(1)
    torch.vgpu.synchronize(gpus[1])
    assert not side.query()
    torch.vgpu.synchronize(gpus[0])
    assert side.query()


def test_asking_until_the_work_is_done_ends(gpus):
    event = torch.vgpu.Event()
    assert event.query(), "nothing is recorded"
    x = megabyte(gpus[0])
    event.record()
    questions = 1
    while not event.query():
        questions += 1
    x.add_(1)
    while not torch.vgpu.current_stream().query():
        questions += 1
    assert 10 < questions < 10 * ADD / LAUNCH_OVERHEAD


# ---- events ----


def test_an_event_of_one_device_delays_a_stream_of_another(gpus):
    x, y = megabyte(gpus[0]), megabyte(gpus[1])
    torch.vgpu.synchronize(0), torch.vgpu.synchronize(1)
    event = torch.vgpu.Event()
    event.wait(torch.vgpu.current_stream(gpus[1]))  # not recorded: waits for nothing
    x.add_(1)
    busy = last()
    event = torch.vgpu.current_stream(gpus[0]).record_event()
    x.add_(1)
    torch.vgpu.current_stream(gpus[1]).wait_event(event)
    y.add_(1)
    assert last().start == busy.end, "the work after the event is not waited for"


def test_the_time_between_two_events(gpus):
    start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    x = megabyte(gpus[0])
    torch.vgpu.synchronize()
    start.record()
    for _ in range(5):
        x.add_(1)
    with pytest.raises(ValueError, match="Both events must be recorded"):
        start.elapsed_time(end)
    end.record()
    with pytest.raises(ValueError, match="Both events must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    expected = (5 * ADD + LAUNCH_OVERHEAD) * 1e3
    assert start.elapsed_time(end) == pytest.approx(expected)
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(torch.vgpu.Event())
    assert start.device == gpus[0]
    with pytest.raises(RuntimeError, match=r"Event device 0 does not match .* device 1"):
        start.record(torch.vgpu.current_stream(gpus[1]))


# ---- current streams ----


def test_set_stream_and_the_current_device(gpus):
    first, second = gpus
    own = torch.vgpu.default_stream(second)
    side = torch.vgpu.Stream(second)
    assert torch.vgpu.current_stream(second) == own == torch.vgpu.default_stream(1) != side
    assert torch.vgpu.current_stream() == torch.vgpu.default_stream(first) != own
    torch.vgpu.set_stream(side)
    assert torch.vgpu.current_stream(second) == side
    assert torch.vgpu.current_device() == 1 and torch.vgpu.current_stream() == side
    with torch.vgpu.stream(torch.vgpu.default_stream(first)):
        assert torch.vgpu.current_device() == 0
        assert torch.vgpu.current_stream(second) == side
    with side, torch.vgpu.Stream(second), side:
        assert torch.vgpu.current_stream(second) == side
    assert torch.vgpu.current_device() == 1
    torch.vgpu.set_stream(None)
    assert torch.vgpu.current_stream(second) == side
    assert isinstance(own, torch.vgpu.Stream) and {side: 1}[torch.vgpu.current_stream(1)]


def test_priorities_and_the_streams_of_a_device(gpus):
    """As in CUDA, a device has 32 streams of each priority, and gives them in turn."""
    stream = torch.vgpu.Stream
    assert stream.priority_range() == (0, -3)
    asked = (0, -1, -3, 5, -7)
    assert [stream(priority=priority).priority for priority in asked] == [0, -1, -3, 0, -3]
    assert torch.vgpu.default_stream().priority == 0
    first = stream(gpus[1])
    others = {stream(gpus[1]) for _ in range(31)}
    assert first not in others and len(others) == 31 and stream(gpus[1]) == first
    with pytest.raises(ValueError, match="Expected a vgpu device, but got: cpu"):
        stream("cpu")
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        stream("vgpu:2")


def test_streams_after_the_virtual_gpus_have_stopped():
    with control.running(count=1):
        side, event = torch.vgpu.Stream(), torch.vgpu.Event()
        event.record()
        block = torch.vgpu.stream(side)
        block.__enter__()
    block.__exit__(None, None, None)
    for use in (side.synchronize, event.query, torch.vgpu.Stream, torch.vgpu.current_stream):
        with pytest.raises(RuntimeError, match="no virtual GPUs are running"):
            use()
    with control.running(count=1) as (device,):
        assert torch.vgpu.current_stream() == torch.vgpu.default_stream(device)


def test_the_first_side_stream_sees_work_that_the_recorder_has_taken():
    """`multigpu virtual` removes events from the clock while the program runs."""

    def end_of_a_kernel_beside(takes: bool) -> float:
        with control.running(1, gpu="A100-40GB", compute=False) as (device,):
            x = torch.empty(8192, 8192, device=device)
            y = x @ x
            if takes:
                take_events(machine.current().clock)
            with torch.vgpu.stream(torch.vgpu.Stream(device)):
                torch.mm(x, x, out=y)
            return last().end

    assert end_of_a_kernel_beside(True) == end_of_a_kernel_beside(False)
