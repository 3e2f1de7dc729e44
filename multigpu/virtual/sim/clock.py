"""The simulated clock: a discrete-event simulation of host threads that launch operations and
of devices that execute them in streams.

The rules are CUDA's, simplified:
- The host spends some time on each operation (host.py), and LAUNCH_OVERHEAD seconds on each
  transfer and collective, then continues. It waits only where it needs a value.
- A stream executes its operations one after the other. An operation starts when it has been
  launched and the previous operation of its stream has ended. Two streams of a device are
  independent, except for the hardware that they share (streams.py) and for the events that
  the program makes them wait for.
- An operation goes to the current stream of its device, also in backward. CUDA's backward goes
  to the streams of forward.
- A transfer goes to the current streams of both its devices, as in PyTorch, with or without
  non_blocking. It starts when all earlier work of both streams has ended, and later work of
  both streams waits for it.
- A collective overlaps with the computation, as on NCCL's stream; see process_group.py. It
  starts after the earlier work of the current stream, and `wait()` makes the then current
  stream wait for it.
- Each host thread has its own clock. DataParallel's threads share the GIL, so in each thread
  an operation takes the host's time times the number of threads. In backward each device has a
  host thread, as in autograd.

The simulation reads no real clock, so two runs of a program give the same times.
"""

import threading
from collections import Counter, defaultdict
from threading import get_ident
from typing import Any

import torch

from multigpu.virtual.sim import names
from multigpu.virtual.sim.event import HOST, Event
from multigpu.virtual.sim.host_thread import NO_BACKWARD, HostThread
from multigpu.virtual.sim.network import Network, host_copy_seconds, transfer_seconds
from multigpu.virtual.sim.presets import KERNEL_OVERHEAD, LAUNCH_OVERHEAD, LINKS, Gpu
from multigpu.virtual.sim.streams import DEFAULT, INTERRUPTED, Engine, Sms, StreamClock

# The number of the backward pass that this thread executes, or NO_BACKWARD.
_graph_task = torch._C._current_graph_task_id


class Clock:
    """The simulated times of one machine, in seconds since control.start.

    `gpus` are the devices' models, and `nodes` their nodes.
    """

    def __init__(self, gpus: list[Gpu], network: Network, nodes: list[int]):
        self.network = network
        self.nodes = nodes
        self.host_links = [LINKS[gpu.host] for gpu in gpus]
        # The streams of each device, by their number.
        self.streams = [{DEFAULT: StreamClock(index)} for index in range(len(nodes))]
        # How many streams a program has made, by (device, priority).
        self.num_streams_made: Counter[tuple[int, int]] = Counter()
        # The copy engine of each (source, destination).
        self.copy_engines: dict[tuple[int, int], Engine] = defaultdict(Engine)
        # The fields of all events, one after the other. A million Event objects would slow the
        # garbage collector down, and so every operation.
        self.log: list[Any] = []
        # The number of events that `take_events` (notes.py) has removed from the log. The lock
        # is held while it changes.
        self.num_taken = 0
        self.taking = threading.Lock()
        # The bytes that were copied, by (source, destination), and those that this process
        # sent in collectives and messages, by (other rank, own node, the other's node).
        self.copied: Counter[tuple[int, int]] = Counter()
        self.sent: Counter[tuple[int, int, int]] = Counter()
        # The texts that notes.py adds to events, by the number of the event.
        self.marks: list[tuple[int, str]] = [(0, "")]
        self.contents: dict[int, str] = {}
        # Unfinished collectives and messages (VirtualWork), by the id of each block of which
        # they use bytes. A send uses no block and is listed under its own id.
        self.pending: dict[int, list[Any]] = {}
        # True inside an optimizer's step.
        self.updating = False
        # The number of replica threads that share the GIL.
        self.num_replica_threads = 1
        self.local = threading.local()
        self.main_thread = self.local.host_thread = HostThread(0.0, 1, self._default_streams())
        self.other_threads: list[HostThread] = []

    def host_thread(self) -> HostThread:
        """The calling thread's clock.

        A new thread starts at the main thread's time, on the default streams. When threads
        have ended, the main thread's time becomes at least their time.
        """
        host = getattr(self.local, "host_thread", None)
        if host is None:
            time = self.main_thread.time
            host = HostThread(time, self.num_replica_threads, self._default_streams())
            self.local.host_thread = host
            self.other_threads.append(host)
        elif self.other_threads and host is self.main_thread:
            ended = [other for other in self.other_threads if not other.thread.is_alive()]
            for other in ended:
                host.time = max(host.join(), other.join())
                self.other_threads.remove(other)
        return host

    def compute(
        self,
        device: int,
        name: str,
        seconds: float,
        host_seconds: float = LAUNCH_OVERHEAD,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Execute an operation that takes `seconds`, and on the host `host_seconds`.

        `shape` is its result's.
        """
        # Hot path: the usual cases of host_thread, launch and phase are repeated here, because
        # calls cost time.
        graph_task = _graph_task()
        host = self.main_thread
        if self.other_threads or host.thread_id != get_ident():
            host = self.host_thread()
        if graph_task == host.graph_task == NO_BACKWARD:
            host.time += host_seconds * host.lock_sharers
            start = host.time
        else:
            start = host.launch(device, graph_task, host_seconds)
        stream = host.streams[device]
        if start < stream.free_at:
            start = stream.free_at
        if stream.sms is None:
            end = start + KERNEL_OVERHEAD + seconds
            stream.computes_until = end
        else:
            start, end = self._run_beside(stream, start, KERNEL_OVERHEAD + seconds)
        stream.free_at = end
        if self.updating:
            phase = "update"
        elif graph_task == NO_BACKWARD:
            phase = "forward"
        else:
            phase = "backward"
        self.log += (device, "compute", phase, name, start, end, None, stream.number, shape)

    def _run_beside(
        self, stream: StreamClock, ready: float, seconds: float
    ) -> tuple[float, float]:
        """Run a kernel on a device with several streams; return its start and its end."""
        if not stream.urgent:
            return stream.sms.run(ready, seconds)
        start, end, rest = stream.sms.run_urgently(ready, seconds)
        if rest is not None:
            phase, device = self.phase(), stream.device
            self.log += (device, "compute", phase, INTERRUPTED, *rest, None, DEFAULT, None)
            # A stream whose work ends later has waited somewhere, and has lost no time.
            for other in self.streams[device].values():
                if not other.urgent and start < other.free_at <= rest[0]:
                    other.delay(rest[1])
        return start, end

    def events(self) -> list[Event]:
        """All events so far, in the order in which they were logged."""
        fields = len(Event._fields)
        return [Event(*self.log[i : i + fields]) for i in range(0, len(self.log), fields)]

    def reached(self) -> float:
        """The time at which all work launched so far ends.

        Nothing waits for it, and any thread may ask.
        """
        # Copies, because another thread can add a branch or a stream meanwhile.
        hosts = [self.main_thread, *self.other_threads]
        times = [host.time for host in hosts]
        times += [time for host in hosts for time in tuple(host.backward_times.values())]
        for streams in self.streams:
            times += [stream.free_at for stream in tuple(streams.values())]
        return max(times)

    def phase(self) -> str:
        """The current phase: "update", "forward" or "backward"."""
        if self.updating:
            return "update"
        return "forward" if _graph_task() == NO_BACKWARD else "backward"

    def transfer(
        self, source: int, destination: int, nbytes: int, wait: bool, pinned: bool = False
    ) -> None:
        """Copy `nbytes` bytes between two devices, one of which can be HOST.

        With `wait` the host continues only when the bytes have arrived. `pinned` says whether
        the host's memory is pinned.
        """
        host = self.host_thread()
        pair = (source, destination)
        device, peer = pair if source != HOST else (destination, HOST)
        if peer == HOST:
            seconds = host_copy_seconds(nbytes, self.host_links[device], pinned)
        else:
            link = self.network.path(self.nodes[source], self.nodes[destination])
            seconds = transfer_seconds(nbytes, link)
        self.copied[pair] += nbytes
        launched = host.launch(device, _graph_task())
        streams = [host.streams[place] for place in pair if place != HOST]
        ready = max(launched, *(stream.free_at for stream in streams))
        start, end = self.copy_engines[pair].run(ready, seconds)
        for stream in streams:
            stream.delay(end)
        name = f"{device_name(source)} → {device_name(destination)}"
        number = streams[0].number
        self.log += (device, "transfer", self.phase(), name, start, end, peer, number, None)
        if wait:
            host.time = max(host.join(), end)

    def stream(self, device: int, number: int) -> StreamClock:
        """Stream `number` of a device."""
        streams = self.streams[device]
        if number not in streams:
            streams[number] = StreamClock(device, number, self._shared_sms(device))
        return streams[number]

    def _shared_sms(self, device: int) -> Sms:
        """The SMs of a device that has several streams."""
        default = self.streams[device][DEFAULT]
        if default.sms is None:
            default.sms = Sms()
            # Nothing more is launched before `now`.
            now = self.main_thread.time
            if default.computes_until > now:
                default.sms.run(now, default.computes_until - now)
        return default.sms

    def _default_streams(self) -> list[StreamClock]:
        return [streams[DEFAULT] for streams in self.streams]

    def current_streams(self) -> list[StreamClock]:
        """The calling thread's current streams, one for each device."""
        return self.host_thread().streams

    def set_streams(self, streams: list[StreamClock]) -> None:
        """Set the calling thread's current streams, one for each device."""
        self.host_thread().streams = streams

    def now(self, device: int) -> float:
        """The host's time, in backward that of the device's branch."""
        return self.host_thread().launch(device, _graph_task(), 0.0)

    def has_passed(self, time: float) -> bool:
        """Whether it is `time` or later for the host. Asking takes the host LAUNCH_OVERHEAD.

        Without a cost, a program that asks until the answer is True would never end.
        """
        host = self.host_thread()
        host.time = host.join() + LAUNCH_OVERHEAD
        return host.time >= time

    def synchronize(self, *devices: int) -> float:
        """Let the host wait for the devices' work (default: all devices); return its time."""
        for work in [work for works in self.pending.values() for work in works]:
            if not devices or work.meter.index in devices:
                work.wait()
        host = self.host_thread()
        self.num_replica_threads = 1
        times = [self.busy_until(i) for i in devices or range(len(self.streams))]
        if not devices:
            times += [other.join() for other in self.other_threads]
        host.time = max(host.join(), *times)
        return host.time

    def synchronize_stream(self, device: int) -> None:
        """Let the host wait for the work of the device's current stream."""
        host = self.host_thread()
        host.time = max(host.join(), host.streams[device].free_at)

    def busy_until(self, device: int) -> float:
        """The time at which the device ends the work of all its streams."""
        return max(stream.free_at for stream in self.streams[device].values())

    def launch_collective(self, device: int) -> float:
        """Launch a collective; return the time at which its tensors are ready.

        They are ready when the current stream has done its earlier work.
        """
        host = self.host_thread()
        launched = host.launch(device, _graph_task())
        return max(launched, host.streams[device].free_at)

    def wait_for_collectives(self, tensors: list) -> None:
        """Wait for the unfinished collectives that use bytes of the virtual tensors.

        Call this before an operation uses the tensors.
        """
        for tensor in tensors:
            for work in tuple(self.pending.get(id(tensor._block), ())):
                if work.uses(tensor):
                    work.wait()

    def wait_host(self, until: float) -> None:
        """Let the calling host thread wait until the time `until`."""
        host = self.host_thread()
        host.time = max(host.join(), until)

    def delay(self, device: int, until: float) -> None:
        """Make later work of the device's current stream start at `until` or later.

        The host does not wait.
        """
        self.host_thread().streams[device].delay(until)


def device_name(device: int) -> str:
    """A device's name in events, such as "vgpu:0"; "host" for HOST."""
    return "host" if device == HOST else f"{names.shown_type()}:{device}"
