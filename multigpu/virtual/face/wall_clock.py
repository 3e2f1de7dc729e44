"""With `--clock simulated` a program that times itself reads the simulated clock.

time.time, time.perf_counter and timeit then give the host's simulated time; CUDA's events
always do. Only torch's operations on virtual GPUs and the program's time.sleep take simulated
time, so the program's other work, such as loading data, takes none.

The standard library, torch and this package still read the real clock: a wait with a deadline
would never end if the clock stood still. time.monotonic stays as it is, and time.sleep also
sleeps, because the program can wait for another process.
"""

import sys
import time
import timeit
from collections.abc import Callable
from threading import get_ident
from typing import Any

from multigpu.virtual.patches.replacing import Replacement, Row, Setting
from multigpu.virtual.sim import machine

# Seconds that reading the clock takes, so that no two readings are the same: programs divide
# by their difference.
READING = 1e-7
_REAL_FOR = sys.stdlib_module_names | {"torch", "multigpu", "lightning_fabric"}
_real_time = time.time


class _Wanted:
    """Whether the rows below apply, and the real time at which simulated time is 0."""

    simulated = False
    zero = 0.0


def want(simulated: bool) -> None:
    """Choose the clock for the next TABLE.apply()."""
    _Wanted.simulated = simulated
    _Wanted.zero = _real_time()


def is_wanted() -> bool:
    """Whether programs read the simulated clock."""
    return _Wanted.simulated


def simulated_seconds() -> float:
    """The host's simulated time in seconds since the virtual GPUs were started."""
    if machine.running() is None:
        return 0.0
    host = machine.current().clock.host_thread()
    host.join()
    host.time += READING
    return host.time


def _asked_by_program() -> bool:
    """Whether the caller of the clock is the program, or a library other than torch."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller == "__main__" or caller.partition(".")[0] not in _REAL_FOR


def _clock(
    zero: Callable[[], float], unit: int | None = None
) -> Callable[[Callable], Callable]:
    """Return the `make` of a row for a clock that reads `zero()` when the GPUs start.

    The program then reads simulated seconds, or a whole number with `unit` per second.
    """

    def make(original: Callable) -> Callable:
        def now() -> float:
            if not _asked_by_program():
                return original()
            seconds = zero() + simulated_seconds()
            return seconds if unit is None else int(seconds * unit)

        now.__name__ = original.__name__
        return now

    return make


def _sleep(original: Callable[[float], None]) -> Callable[[float], None]:
    """time.sleep, which takes the host's simulated time too, whichever clock is read.

    Not in a thread of the program's own, which may only watch what the main thread does.
    """

    def sleep(seconds: float, /) -> None:
        original(seconds)
        if not _asked_by_program() or machine.running() is None:
            return
        clock = machine.current().clock
        if clock.main_thread.thread_id == get_ident():
            clock.wait_host(clock.main_thread.join() + seconds)

    return sleep


def _timeit() -> Callable[[], None]:
    """Let timeit's functions use the simulated clock where they would use the real one."""
    functions = (timeit.Timer.__init__, timeit.timeit, timeit.repeat)
    before = [function.__defaults__ for function in functions]
    real = timeit.default_timer
    timeit.default_timer = simulated_seconds
    for function, defaults in zip(functions, before, strict=True):
        function.__defaults__ = tuple(
            simulated_seconds if value is real else value for value in defaults
        )

    def restore() -> None:
        timeit.default_timer = real
        for function, defaults in zip(functions, before, strict=True):
            function.__defaults__ = defaults

    return restore


def _since_epoch() -> float:
    return _Wanted.zero


def _since_start() -> float:
    return 0.0


_WHY = "the program's own timing is then that of the simulated GPUs"
_CLOCKS: dict[str, Any] = {
    "time": _clock(_since_epoch),
    "time_ns": _clock(_since_epoch, 10**9),
    "perf_counter": _clock(_since_start),
    "perf_counter_ns": _clock(_since_start, 10**9),
}
ROWS: tuple[Row, ...] = (
    *(Replacement("time", name, make, _WHY, when=is_wanted) for name, make in _CLOCKS.items()),
    Replacement("time", "sleep", _sleep, "CUDA's events have the time in which a host slept"),
    Setting("timeit's timer", _timeit, _WHY, when=is_wanted),
)
