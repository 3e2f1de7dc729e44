"""The streams of a device on the simulated clock, and what they share.

A stream executes its work in order. When a program launches work, everything that this work
waits for has been launched before. So its start and its end are known at once, and the clock
needs no queue of events: a stream is the time at which its work ends.

What two streams of one device cost each other:
- Kernels share the device's SMs, which work on one kernel at a time: two kernels take the sum
  of their times, also if a GPU would run small ones side by side.
- Kernels of equal priority have the SMs in the order in which the host has launched them. A
  kernel that is ready earlier than one launched before it runs in the time that is left free,
  and pauses while the other one runs. On a GPU, a kernel also gets in between two kernels of
  another stream that were launched before it.
- A kernel of a stream with a priority above the default runs when it is ready. The kernels
  that it interrupts keep the times that they were given, and the rest of their work follows
  as an event of its own, named INTERRUPTED. (PyTorch's FSDP2 gives its streams a high priority
  so that their copies are not "delayed and block computation", _fsdp_param_group.py.)
- Copies between the same two ends share a copy engine, in the order of their launches.
- A copy or a collective overlaps with kernels and does not slow them down. On a GPU it takes a
  part of the memory's bandwidth, and a collective also takes a few SMs: the clock is
  optimistic there.
"""

from bisect import bisect_left, bisect_right

# The number of a device's default stream. The numbers from 1 on are those of the side streams
# with the default priority 0, then those with -1, and so on; a lower number is a higher
# priority. torch.cuda has as many streams, and gives them in turn (c10/cuda/CUDAStream.h).
DEFAULT = 0
STREAMS_PER_PRIORITY = 32
LOWEST_PRIORITY = 0
HIGHEST_PRIORITY = -3
INTERRUPTED = "interrupted kernels"


def first_number(priority: int) -> int:
    """The number of the first side stream with this priority."""
    return DEFAULT + 1 - priority * STREAMS_PER_PRIORITY


def priority_of(number: int) -> int:
    """The priority of the stream with this number."""
    return 0 if number == DEFAULT else -((number - DEFAULT - 1) // STREAMS_PER_PRIORITY)


class StreamClock:
    """The time of stream `number` of a device.

    free_at         when the work launched so far ends, in simulated seconds
    computes_until  when the last kernel ends that was launched while `sms` was None
    sms             the device's SMs; None while the device has its default stream only, whose
                    kernels run one after the other
    urgent          whether its priority is above the default
    """

    __slots__ = ("computes_until", "device", "free_at", "number", "sms", "urgent")

    def __init__(self, device: int, number: int = DEFAULT, sms: "Sms | None" = None):
        self.device = device
        self.number = number
        self.urgent = priority_of(number) < LOWEST_PRIORITY
        self.free_at = 0.0
        self.computes_until = 0.0
        self.sms = sms

    def delay(self, until: float) -> None:
        """Make later work start at `until` or later."""
        self.free_at = max(self.free_at, until)


class Engine:
    """Hardware that does one thing at a time, such as a copy engine.

    `starts` and `ends` are the spans in which it works, disjoint and in order.
    """

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def run(self, ready: float, seconds: float) -> tuple[float, float]:
        """Work for `seconds` from `ready` on; return the start and the end.

        The work pauses in the spans that are taken already.
        """
        starts, ends = self.starts, self.ends
        if not ends or ready > ends[-1]:
            starts.append(ready)
            ends.append(ready + seconds)
            return ready, ends[-1]
        # The first span that ends later.
        place = bisect_right(ends, ready)
        if place < len(starts) and starts[place] <= ready:
            ready = ends[place]
            place += 1
        start, left = ready, seconds
        while place < len(starts) and left > starts[place] - ready:
            left -= starts[place] - ready
            ready = ends[place]
            place += 1
        self.take(start, ready + left)
        return start, ready + left

    def busy(self, start: float, end: float) -> float:
        """The seconds within [start, end] in which it works."""
        first = bisect_right(self.ends, start)
        last = bisect_left(self.starts, end)
        spans = zip(self.starts[first:last], self.ends[first:last], strict=True)
        return sum(min(stop, end) - max(begin, start) for begin, stop in spans)

    def take(self, start: float, end: float) -> None:
        """Make [start, end] one span, with all the spans that touch it."""
        first = bisect_left(self.ends, start)
        last = bisect_right(self.starts, end)
        if first < last:
            start = min(start, self.starts[first])
            end = max(end, self.ends[last - 1])
        self.starts[first:last] = [start]
        self.ends[first:last] = [end]


class Sms:
    """The SMs of a device: the spans of all kernels, and those of urgent kernels."""

    __slots__ = ("all", "urgent")

    def __init__(self) -> None:
        self.all = Engine()
        self.urgent = Engine()

    def run(self, ready: float, seconds: float) -> tuple[float, float]:
        """Run a kernel of the default priority; return its start and its end."""
        return self.all.run(ready, seconds)

    def run_urgently(
        self, ready: float, seconds: float
    ) -> tuple[float, float, tuple[float, float] | None]:
        """Run a kernel that waits for urgent ones only.

        Returns its start, its end, and the span in which the kernels that it has interrupted
        make up for the time that it has taken from them; None if it has taken none.
        """
        start, end = self.urgent.run(ready, seconds)
        taken = seconds - (end - start - self.all.busy(start, end))
        self.all.take(start, end)
        return start, end, self.all.run(end, taken) if taken > 0 else None
