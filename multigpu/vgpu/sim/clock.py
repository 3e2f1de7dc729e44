"""The simulated clock: a discrete-event simulation of host threads that launch operations and
of devices that execute them in order.

The rules are CUDA's, simplified:
- The host spends LAUNCH_OVERHEAD seconds on the launch of each operation, then continues. It
  waits only where it needs a value.
- A device executes its operations one after the other. An operation starts when it has been
  launched and the previous operation has ended.
- A transfer on the current streams is in stream order, as in PyTorch, with or without
  non_blocking. It starts when all earlier work of both devices has ended, and later work of
  both devices waits for it.
- A transfer on a side stream overlaps with the computation, on the copy engine of its pair of
  devices. It starts when it has been launched and its source is ready. Later work of the
  destination waits for it, as if wait_stream followed at once. Transfers within
  `with torch.vgpu.stream(side):` are on a side stream, and so are the chunks of a batch that
  DataParallel sends from the host.
- A collective overlaps with the computation, as on NCCL's stream; see process_group.py.
- Each host thread has its own clock. DataParallel's threads share the GIL, so in each thread
  a launch takes LAUNCH_OVERHEAD times the number of threads. In backward each device has a
  host thread, as in autograd.

The simulation reads no real clock, so two runs of a program give the same times.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch

from multigpu.vgpu.sim.network import Network, transfer_seconds
from multigpu.vgpu.sim.presets import KERNEL_OVERHEAD, LAUNCH_OVERHEAD, LINKS, Gpu

# The host's number in a transfer; devices are numbered from 0.
HOST = -1
NO_BACKWARD = -1
# The number of the backward pass that this thread executes, or NO_BACKWARD.
_graph_task = torch._C._current_graph_task_id


class Event(NamedTuple):
    """One unit of work of a device; `start` and `end` are in simulated seconds.

    kind is "compute", "transfer" or "collective"; phase is "forward", "backward" or "update"
    (an optimizer's step). A transfer has two ends: `device` is its source, or its destination
    if the source is the host; `peer` is the other end (HOST for the host). For a message
    between ranks `peer` is None.
    """

    device: int
    kind: str
    phase: str
    name: str
    start: float
    end: float
    peer: int | None = None


class HostThread:
    """The clock of one host thread; in backward it has one branch for each device.

    `time` is in simulated seconds. `lock_sharers` is the number of threads that share the GIL,
    and `backward_times` are the times of the branches by device.
    """

    __slots__ = (
        "backward_times", "graph_task", "lock_sharers", "thread", "thread_id", "time",
    )  # fmt: skip

    def __init__(self, time: float, lock_sharers: int):
        self.time = time
        self.lock_sharers = lock_sharers
        self.thread = threading.current_thread()
        self.thread_id = get_ident()
        self.graph_task = NO_BACKWARD
        self.backward_times: dict[int, float] = {}

    def launch(self, device: int, graph_task: int) -> float:
        """Add the time of one launch on `device`, and return the time at its end.

        `graph_task` is the number of the backward pass that launches, or NO_BACKWARD.
        """
        if graph_task != self.graph_task:
            self.join()
            self.graph_task = graph_task
        if graph_task == NO_BACKWARD:
            self.time += LAUNCH_OVERHEAD * self.lock_sharers
            return self.time
        time = self.backward_times.get(device, self.time) + LAUNCH_OVERHEAD
        self.backward_times[device] = time
        return time

    def join(self) -> float:
        """Wait for the branches of backward, and return the new time."""
        if self.backward_times:
            self.time = max(self.time, *self.backward_times.values())
            self.backward_times.clear()
        return self.time


class Clock:
    """The simulated times of one machine, in seconds since vgpu.start.

    `nodes` has each device's node.
    """

    def __init__(self, gpu: Gpu, network: Network, nodes: list[int]):
        self.network = network
        self.nodes = nodes
        self.host_link = LINKS[gpu.host]
        # The time at which each device ends the work launched so far.
        self.device_free_at = [0.0] * len(nodes)
        # The time at which the copy engine of each (source, destination) ends its transfers.
        self.engine_free_at: dict[tuple[int, int], float] = {}
        # The fields of all events, one after the other. A million Event objects would slow the
        # garbage collector down, and so every operation.
        self.log: list[Any] = []
        # The texts that notes.py adds to events, by the number of the event.
        self.marks: list[tuple[int, str]] = [(0, "")]
        self.contents: dict[int, str] = {}
        # Unfinished collectives and messages (VirtualWork), by the id of each block that they
        # use. A send uses no block and is listed under its own id.
        self.pending: dict[int, Any] = {}
        # True inside an optimizer's step.
        self.updating = False
        # The number of replica threads that share the GIL.
        self.num_replica_threads = 1
        self.local = threading.local()
        self.main_thread = self.local.host_thread = HostThread(0.0, 1)
        self.other_threads: list[HostThread] = []

    def host_thread(self) -> HostThread:
        """The calling thread's clock.

        A new thread starts at the main thread's time. When threads have ended, the main
        thread's time becomes at least their time.
        """
        host = getattr(self.local, "host_thread", None)
        if host is None:
            host = HostThread(self.main_thread.time, self.num_replica_threads)
            self.local.host_thread = host
            self.other_threads.append(host)
        elif self.other_threads and host is self.main_thread:
            ended = [other for other in self.other_threads if not other.thread.is_alive()]
            for other in ended:
                host.time = max(host.join(), other.join())
                self.other_threads.remove(other)
        return host

    def compute(self, device: int, name: str, seconds: float) -> None:
        """Execute an operation of `seconds` seconds on the device."""
        # Hot path: the usual cases of host_thread, launch and phase are repeated here, because
        # calls cost time.
        graph_task = _graph_task()
        host = self.main_thread
        if self.other_threads or host.thread_id != get_ident():
            host = self.host_thread()
        if graph_task == host.graph_task == NO_BACKWARD:
            host.time += LAUNCH_OVERHEAD * host.lock_sharers
            start = host.time
        else:
            start = host.launch(device, graph_task)
        if start < self.device_free_at[device]:
            start = self.device_free_at[device]
        end = self.device_free_at[device] = start + KERNEL_OVERHEAD + seconds
        if self.updating:
            phase = "update"
        elif graph_task == NO_BACKWARD:
            phase = "forward"
        else:
            phase = "backward"
        self.log += (device, "compute", phase, name, start, end, None)

    def events(self) -> list[Event]:
        """All events so far, in the order in which they were logged."""
        fields = len(Event._fields)
        return [Event(*self.log[i : i + fields]) for i in range(0, len(self.log), fields)]

    def phase(self) -> str:
        """The current phase: "update", "forward" or "backward"."""
        if self.updating:
            return "update"
        return "forward" if _graph_task() == NO_BACKWARD else "backward"

    def transfer(self, source: int, destination: int, nbytes: int, wait: bool) -> None:
        """Copy `nbytes` bytes between two devices, one of which can be HOST.

        With `wait` the host continues only when the bytes have arrived.
        """
        host = self.host_thread()
        pair = (source, destination)
        if HOST in pair:
            link = self.host_link
        else:
            link = self.network.path(self.nodes[source], self.nodes[destination])
        device, peer = pair if source != HOST else (destination, HOST)
        side = getattr(self.local, "side", False)
        # On a side stream only the source has to be ready, and only the destination waits.
        waits_for = [place for place in (pair[:1] if side else pair) if place != HOST]
        delays = [place for place in (pair[1:] if side else pair) if place != HOST]
        start = max(
            host.launch(device, _graph_task()),
            self.engine_free_at.get(pair, 0.0),
            *(self.device_free_at[place] for place in waits_for),
        )
        end = self.engine_free_at[pair] = start + transfer_seconds(nbytes, link)
        for place in delays:
            self.delay_device(place, end)
        name = f"{device_name(source)} → {device_name(destination)}"
        self.log += (device, "transfer", self.phase(), name, start, end, peer)
        if wait:
            host.time = max(host.join(), end)

    @contextmanager
    def on_side_stream(self, side: bool = True) -> Iterator[None]:
        """Within the block this thread's transfers overlap with the computation.

        With side=False they are in stream order.
        """
        before = getattr(self.local, "side", False)
        self.local.side = side
        try:
            yield
        finally:
            self.local.side = before

    def synchronize(self, *devices: int) -> float:
        """Let the host wait for the devices' work (default: all devices); return its time."""
        for work in list(self.pending.values()):
            if not devices or work.meter.index in devices:
                work.wait()
        host = self.host_thread()
        self.num_replica_threads = 1
        times = [self.device_free_at[i] for i in devices or range(len(self.device_free_at))]
        if not devices:
            times += self.engine_free_at.values()
            times += [other.join() for other in self.other_threads]
        host.time = max(host.join(), *times)
        return host.time

    def launch_collective(self, device: int) -> float:
        """Launch a collective; return the time at which its tensors are ready."""
        launched = self.host_thread().launch(device, _graph_task())
        return max(launched, self.device_free_at[device])

    def wait_for_collectives(self, tensors: list) -> None:
        """Wait for the unfinished collectives that use one of the virtual tensors.

        Call this before an operation uses the tensors.
        """
        for tensor in tensors:
            work = self.pending.get(id(tensor._block))
            if work is not None:
                work.wait()

    def wait_host(self, until: float) -> None:
        """Let the calling host thread wait until the time `until`."""
        host = self.host_thread()
        host.time = max(host.join(), until)

    def delay_device(self, device: int, until: float) -> None:
        """Make later work of the device start at `until` or later; the host does not wait."""
        self.device_free_at[device] = max(self.device_free_at[device], until)


def device_name(device: int) -> str:
    """A device's name in events: "vgpu:0", or "host" for HOST."""
    return "host" if device == HOST else f"vgpu:{device}"
