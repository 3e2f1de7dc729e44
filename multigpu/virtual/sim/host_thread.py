"""A host thread on the simulated clock: its time, and its current streams.

As in PyTorch, each thread has a current stream for each device.
"""

import threading
from threading import get_ident

from multigpu.virtual.sim.presets import LAUNCH_OVERHEAD
from multigpu.virtual.sim.streams import StreamClock

NO_BACKWARD = -1


class HostThread:
    """The clock of one host thread; in backward it has one branch for each device.

    time            in simulated seconds
    lock_sharers    the number of threads that share the GIL
    streams         the thread's current stream for each device
    backward_times  the times of the branches by device
    """

    __slots__ = (
        "backward_times", "graph_task", "lock_sharers", "streams", "thread", "thread_id",
        "time",
    )  # fmt: skip

    def __init__(self, time: float, lock_sharers: int, streams: list[StreamClock]):
        self.time = time
        self.lock_sharers = lock_sharers
        self.thread = threading.current_thread()
        self.thread_id = get_ident()
        self.graph_task = NO_BACKWARD
        self.backward_times: dict[int, float] = {}
        self.streams = streams

    def launch(self, device: int, graph_task: int, seconds: float = LAUNCH_OVERHEAD) -> float:
        """Add the host's `seconds` for one launch on `device`, and return the time at its end.

        `graph_task` is the number of the backward pass that launches, or NO_BACKWARD.
        """
        if graph_task != self.graph_task:
            self.join()
            self.graph_task = graph_task
        if graph_task == NO_BACKWARD:
            self.time += seconds * self.lock_sharers
            return self.time
        time = self.backward_times.get(device, self.time) + seconds
        self.backward_times[device] = time
        return time

    def join(self) -> float:
        """Wait for the branches of backward, and return the new time."""
        if self.backward_times:
            self.time = max(self.time, *self.backward_times.values())
            self.backward_times.clear()
        return self.time
