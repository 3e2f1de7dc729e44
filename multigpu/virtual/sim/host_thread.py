"""A host thread on the simulated clock: its time, and its current streams.

As in PyTorch, each thread has a current stream for each device, and backward runs on the
streams of the forward operations. Autograd numbers the nodes of its graph in the order in
which a thread makes them, so a thread notes the number of the next node when its streams
change. In backward, a node's number then gives the streams that were current when it was made.
"""

import threading
from bisect import bisect_right
from threading import get_ident

import torch

from multigpu.virtual.sim.presets import LAUNCH_OVERHEAD
from multigpu.virtual.sim.streams import StreamClock

NO_BACKWARD = -1
# The number of all nodes that add to a parameter's gradient: autograd runs them first.
LEAF = 2**64 - 1
_current_node = torch._C._current_autograd_node
_next_node_number = torch.autograd._get_sequence_nr


class HostThread:
    """The clock of one host thread; in backward it has one branch for each device.

    time            in simulated seconds
    lock_sharers    the number of threads that share the GIL
    streams         the thread's current stream for each device
    backward        the backward pass, if it can run on several streams; else None
    backward_times  the times of the branches by device
    """

    __slots__ = (
        "backward", "backward_times", "changes", "graph_task", "lock_sharers", "streams",
        "thread", "thread_id", "time",
    )  # fmt: skip

    def __init__(self, time: float, lock_sharers: int, streams: list[StreamClock]):
        self.time = time
        self.lock_sharers = lock_sharers
        self.thread = threading.current_thread()
        self.thread_id = get_ident()
        self.graph_task = NO_BACKWARD
        self.backward_times: dict[int, float] = {}
        self.streams = streams
        self.changes = StreamChanges(streams)
        self.backward: Backward | None = None

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

    def stream(self, device: int) -> StreamClock:
        """The device's current stream; in backward that of the node that runs now."""
        if self.backward is not None:
            self.backward.follow(self)
            return self.backward.used(self, device)
        return self.streams[device]

    def set_streams(self, streams: list[StreamClock], node: int | None = None) -> None:
        """Make `streams` the current streams, one for each device.

        `node` is the number of the first node made on them; by default that of the next one.
        """
        self.streams = streams
        self.changes.note(_next_node_number() if node is None else node, streams)


class StreamChanges:
    """The streams that were current when a thread made autograd's nodes.

    From the node with number first[i] on, they were streams[i].
    """

    def __init__(self, streams: list[StreamClock]):
        self.first = [0]
        self.streams = [streams]

    def note(self, number: int, streams: list[StreamClock]) -> None:
        """Note that `streams` are current from the node with this number on."""
        while self.first and self.first[-1] >= number:
            # No node was made on these streams.
            self.first.pop()
            self.streams.pop()
        if not self.streams or self.streams[-1] != streams:
            self.first.append(number)
            self.streams.append(streams)

    def has_several(self) -> bool:
        """Whether nodes were made on different streams."""
        return len(self.first) > 1

    def at(self, number: int) -> list[StreamClock]:
        """The streams that were current when the node with this number was made."""
        return self.streams[bisect_right(self.first, number) - 1]


class Backward:
    """One backward pass that runs on the streams of the forward operations.

    As in PyTorch:
    - a stream waits for the caller's stream, on which the first gradient was made
    - a node waits for the nodes that made its gradients (Clock.wait_for_gradients)
    - at the end, the caller's streams wait for the streams that backward has used
    A node that adds to a parameter's gradient (LEAF) runs on the stream of the node before it,
    which has made that gradient.
    """

    def __init__(self, caller: list[StreamClock]):
        self.caller = caller
        self.begin = [stream.free_at for stream in caller]
        self.node: int | None = None
        self.next_number = _next_node_number()
        # The streams of the current node. A hook that sets other streams replaces them.
        self.of_node = caller
        self.streams: set[StreamClock] = set()

    def follow(self, host: HostThread) -> None:
        """Make the streams current that belong to the node that runs now."""
        node = _current_node()
        number = None if node is None else node._sequence_nr()
        # Backward makes nodes, too: with create_graph, and when it repeats a forward. If an
        # operation is the first one of `node`, its own node has been made just before.
        first = max(self.next_number, _next_node_number() - 1)
        self.next_number = _next_node_number()
        if number == self.node:
            return
        self.node = number
        if number is None:
            # All nodes are done. The engine calls back those that have queued a callback.
            self.join()
            self.of_node = self.caller
        elif number != LEAF:
            self.of_node = host.changes.at(number)
        if host.streams is not self.of_node:
            host.set_streams(self.of_node, first)

    def uses_streams_of_node(self, host: HostThread) -> bool:
        """Whether the current streams are the node's, and not those that a hook has set."""
        return host.streams is self.of_node

    def used(self, host: HostThread, device: int) -> StreamClock:
        """The device's current stream, on which the current node launches work."""
        stream = host.streams[device]
        is_new = stream is not self.caller[device] and stream not in self.streams
        if is_new and self.uses_streams_of_node(host):
            self.streams.add(stream)
            stream.delay(self.begin[device])
        return stream

    def join(self) -> None:
        """Make the caller's streams wait for the streams that backward has used."""
        for stream in self.streams:
            self.caller[stream.device].delay(stream.free_at)
