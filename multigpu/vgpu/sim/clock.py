"""When does each operation run? A discrete-event simulation: a host that launches, devices that work in order.

The rules, which are CUDA's in short:
- The host pays LAUNCH_OVERHEAD for an operation and goes on; it waits only where it needs a number.
- A device runs its operations one after the other, each when it is launched and the one before has ended.
- A transfer is in stream order, as PyTorch's copies are on current streams, also with non_blocking: it starts when all
  that its devices were given before has ended, and what they run later waits for it.
- A transfer on a side stream (`with torch.vgpu.stream(side):`, and the pieces of a batch that DataParallel sends from
  the host) runs beside the computation, on the copy engine of its pair of devices. It starts when it is launched and
  its source is ready; what the destination runs later waits for it, as if wait_stream followed at once.
- A collective runs beside the computation, as NCCL's stream does; see process_group.py.
- Each thread has a host clock of its own. DataParallel's threads share Python's lock, so each pays for all of them.
  In backward each device has a host thread, as autograd has for GPUs.

Nothing is read from a real clock, so two runs of a program give the same times.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch

from multigpu.vgpu.sim.presets import KERNEL_OVERHEAD, LAUNCH_OVERHEAD, LINKS, Gpu, Link

HOST = -1  # the host's place in a transfer, beside the devices' indices
_backward = torch._C._current_graph_task_id  # -1 outside of backward


class Event(NamedTuple):
    """Something that took time: on which device, what kind, its name, from when to when (simulated seconds).

    kind is "compute", "transfer" or "collective"; phase is "forward", "backward" or "update" (an optimizer's step).
    A transfer has the device that it comes from, or goes to if it comes from the host; `peer` is the other end.
    """

    device: int
    kind: str
    phase: str
    name: str
    start: float
    end: float
    peer: int | None = None


class Host:
    """The clock of one thread of the host, and in backward one a device."""

    __slots__ = ("branches", "share", "task", "thread", "thread_id", "time")

    def __init__(self, time: float, share: int):
        self.time, self.share = time, share
        self.thread, self.thread_id = threading.current_thread(), get_ident()
        self.task, self.branches = -1, {}

    def launch(self, device: int, task: int) -> float:
        """Pay for one launch to the device, and say when it is done. `task` is the backward it belongs to, or -1."""
        if task != self.task:
            self.join()
            self.task = task
        if task == -1:
            self.time += LAUNCH_OVERHEAD * self.share
            return self.time
        time = self.branches[device] = self.branches.get(device, self.time) + LAUNCH_OVERHEAD
        return time

    def join(self) -> float:
        """Backward is over, or the host waits: its threads meet."""
        if self.branches:
            self.time = max(self.time, *self.branches.values())
            self.branches.clear()
        return self.time


class Clock:
    """The simulated times of one machine, in seconds since vgpu.start."""

    def __init__(self, count: int, gpu: Gpu, link: Link):
        self.link, self.host_link = link, LINKS[gpu.host]
        self.free = [0.0] * count  # when a device has done all that was given to it
        self.engines: dict[
            tuple[int, int], float
        ] = {}  # likewise the copy engine of (source, destination)
        self.log: list[
            Any
        ] = []  # the fields of all events, one after the other: a million objects would slow Python's
        # garbage collector, and with it every operation
        self.pending: dict[
            int, Any
        ] = {}  # collectives under way, by the identity of the blocks that they write
        self.updating = False  # inside an optimizer's step
        self.sharing = 1  # how many replicas' threads share Python's lock
        self.local = threading.local()
        self.main = self.local.host = Host(0.0, 1)
        self.children: list[Host] = []

    def host(self) -> Host:
        """This thread's clock. A new thread starts at the main thread's time; the main thread waits for ended ones."""
        host = getattr(self.local, "host", None)
        if host is None:
            host = self.local.host = Host(self.main.time, self.sharing)
            self.children.append(host)
        elif self.children and host is self.main:
            for child in [child for child in self.children if not child.thread.is_alive()]:
                host.time = max(host.join(), child.join())
                self.children.remove(child)
        return host

    def compute(self, device: int, name: str, seconds: float) -> None:
        """An operation of `seconds` on the device."""
        task = _backward()
        host = (
            self.main
            if self.main.thread_id == get_ident() and not self.children
            else self.host()
        )
        if task == host.task == -1:
            host.time += LAUNCH_OVERHEAD * host.share
            start = host.time
        else:
            start = host.launch(device, task)
        if start < self.free[device]:
            start = self.free[device]
        end = self.free[device] = start + KERNEL_OVERHEAD + seconds
        phase = "update" if self.updating else "forward" if task == -1 else "backward"
        self.log += (device, "compute", phase, name, start, end, None)

    def events(self) -> list[Event]:
        """What has happened so far, in the order in which it was launched."""
        fields = len(Event._fields)
        return [Event(*self.log[i : i + fields]) for i in range(0, len(self.log), fields)]

    def phase(self) -> str:
        return self._phase(_backward())

    def _phase(self, task: int) -> str:
        return "update" if self.updating else "forward" if task == -1 else "backward"

    def transfer(self, source: int, destination: int, nbytes: int, wait: bool) -> None:
        """Copy bytes between two places; HOST is one. With `wait` the host goes on when they have arrived."""
        host, pair = self.host(), (source, destination)
        link = self.host_link if HOST in pair else self.link
        device, peer = pair if source != HOST else (destination, HOST)
        task = _backward()
        side = getattr(self.local, "side", False)
        before = [self.free[place] for place in (pair[:1] if side else pair) if place != HOST]
        start = max(host.launch(device, task), self.engines.get(pair, 0.0), *before)
        end = self.engines[pair] = start + link.latency + nbytes / link.bandwidth
        for place in pair[1:] if side else pair:
            if place != HOST:
                self.free[place] = max(self.free[place], end)
        name = f"{label(source)} → {label(destination)}"
        self.log += (device, "transfer", self._phase(task), name, start, end, peer)
        if wait:
            host.time = max(host.join(), end)

    @contextmanager
    def on_side_stream(self, side: bool = True) -> Iterator[None]:
        """Transfers of this thread run beside the computation within the block; with side=False, in stream order."""
        before = getattr(self.local, "side", False)
        self.local.side = side
        try:
            yield
        finally:
            self.local.side = before

    def synchronize(self, *devices: int) -> float:
        """The host waits until the devices, or all of them, have done everything; the time then."""
        for work in list(self.pending.values()):
            if not devices or work.meter.index in devices:
                work.wait()
        host, self.sharing = self.host(), 1
        times = [self.free[device] for device in devices or range(len(self.free))]
        if not devices:
            times += [*self.engines.values(), *(child.join() for child in self.children)]
        host.time = max(host.join(), *times)
        return host.time

    def arrive(self, device: int) -> float:
        """When a collective, launched now, has its tensors ready on this device."""
        return max(self.host().launch(device, _backward()), self.free[device])

    def settle(self, tensors: list) -> None:
        """Before an operation touches tensors: what it runs on waits for the collectives that still write them."""
        for tensor in tensors:
            if (work := self.pending.get(id(tensor._block))) is not None:
                work.wait()

    def wait_host(self, until: float) -> None:
        host = self.host()
        host.time = max(host.join(), until)

    def wait(self, device: int, until: float) -> None:
        """What the device runs from now on starts at `until` at the earliest; the host goes on."""
        self.free[device] = max(self.free[device], until)


def label(device: int) -> str:
    return "host" if device == HOST else f"vgpu:{device}"
