"""With the simulated clock a program that times itself reads the simulated time."""

import threading
import time
import timeit

import torch

import multigpu


def gpu_second() -> None:
    """Let the current GPU be busy for a second of simulated time, and wait for it."""
    torch.cuda._sleep(torch.cuda.get_device_properties().clock_rate * 1000)
    torch.cuda.synchronize()


def test_a_program_reads_the_simulated_clock():
    real_time, real_counter = time.time, time.perf_counter
    before = real_time(), real_counter()
    with multigpu.gpus(2, clock="simulated"):
        starts = [time.time(), time.perf_counter(), timeit.default_timer()]
        nanoseconds = [time.time_ns(), time.perf_counter_ns()]
        gpu_second()
        ends = [time.time(), time.perf_counter(), timeit.default_timer()]
        for start, end in zip(starts, ends, strict=True):
            assert 1 <= end - start < 1.001
        for start, end in zip(
            nanoseconds, [time.time_ns(), time.perf_counter_ns()], strict=True
        ):
            assert isinstance(end, int) and 10**9 <= end - start < 1.001e9
        assert abs(ends[0] - before[0]) < 60  # the time of day
        assert 1 <= timeit.timeit(gpu_second, number=1) < 1.001
        assert 1 <= min(timeit.repeat(gpu_second, number=1, repeat=2)) < 1.001
        assert time.perf_counter() < time.perf_counter()  # programs divide by the difference
    assert time.time is real_time and time.perf_counter is real_counter
    assert timeit.default_timer is real_counter


def test_libraries_that_wait_read_the_real_clock():
    """A wait with a deadline would never end if its clock stood still."""
    with multigpu.gpus(2, clock="simulated"):
        library = {"__name__": "multiprocessing.connection", "time": time}
        exec("first = time.time(); time.sleep(0.01); waited = time.time() - first", library)
        assert library["waited"] >= 0.01
        library_sleep = eval("lambda: time.sleep(0.01)", library)
        program = {"__name__": "train", "time": time, "wait": library_sleep}
        exec("first = time.time(); wait(); waited = time.time() - first", program)
        assert program["waited"] < 0.001


def test_a_programs_sleep_takes_simulated_time_with_either_clock():
    for clock in ("real", "simulated"):
        with multigpu.gpus(2, clock=clock):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.ones(1, device="cuda")
            torch.cuda.synchronize()
            began = time.monotonic()
            start.record()
            watching = threading.Thread(target=lambda: time.sleep(0.02))
            watching.start()
            watching.join()
            time.sleep(0.02)
            end.record()
            end.synchronize()
            assert time.monotonic() - began >= 0.04
            assert 20 <= start.elapsed_time(end) < 20.1
