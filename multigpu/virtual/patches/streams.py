"""Streams and events of virtual GPUs: the classes and functions of torch.cuda for them.

sim/streams.py and sim/clock.py say what they mean for the simulated time. The numbers do not
depend on streams, because the host computes each operation when it is launched. So a program
that forgets to wait gets right numbers, but a time that it would not have on a GPU.
"""

from typing import Any

import torch

from multigpu.virtual.patches.by_device import class_by_device
from multigpu.virtual.patches.devices import DeviceLike, meter_of
from multigpu.virtual.sim import machine as _machine
from multigpu.virtual.sim import names
from multigpu.virtual.sim.clock import Clock
from multigpu.virtual.sim.streams import (
    DEFAULT,
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    STREAMS_PER_PRIORITY,
    StreamClock,
    first_number,
    priority_of,
)

DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)


class Stream(torch.Stream):
    """A stream of a device, as torch.cuda.Stream.

    Kernels of a stream with a `priority` above the default, such as -1, run first. A priority
    that does not exist becomes the nearest one, as in torch.cuda.
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **ids: int) -> "Stream":
        """A stream of the device; with stream_id and device_index, a stream that exists."""
        if not ids:
            index = meter_of(device).index
            number = _next_number(_machine.current().clock, index, priority)
            ids = {"stream_id": number, "device_index": index}
        return super().__new__(cls, **{**ids, "device_type": DEVICE_TYPE})

    def __init__(self, *args: Any, **kwargs: Any):
        # The contexts of `with stream:`; a stream can be entered again within its own block.
        self._contexts: list[StreamContext] = []

    @property
    def device(self) -> torch.device:
        return names.show(torch.device(names.INNER, self.device_index))

    @property
    def cuda_stream(self) -> int:
        """The stream's number, by the name that torch.cuda has for it."""
        return self.stream_id

    @property
    def priority(self) -> int:
        return priority_of(self.stream_id)

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """(the lowest priority, the highest priority)."""
        return LOWEST_PRIORITY, HIGHEST_PRIORITY

    def wait_event(self, event: "Event") -> None:
        """Make later work of this stream wait for the event."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Make later work of this stream wait for the earlier work of another stream."""
        _clock_of(self).delay(_end(stream))

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record the event, or a new one, in this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work of this stream is done. Asking takes the host LAUNCH_OVERHEAD."""
        _check_assert(self.device_index)
        return _machine.current().clock.has_passed(_end(self))

    def synchronize(self) -> None:
        """Let the host wait for all work of this stream."""
        _check_assert(self.device_index)
        _machine.current().clock.wait_host(_end(self))

    def __enter__(self) -> "Stream":
        self._contexts.append(StreamContext(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    def __repr__(self) -> str:
        name = f"torch.{names.shown_type()}.Stream"
        return f"<{name} device={self.device} stream_id={self.stream_id}>"


def _next_number(clock: Clock, index: int, priority: int) -> int:
    """The number of the stream that a device gives next for this priority."""
    priority = min(max(priority, HIGHEST_PRIORITY), LOWEST_PRIORITY)
    made = clock.num_streams_made[index, priority]
    clock.num_streams_made[index, priority] += 1
    return first_number(priority) + made % STREAMS_PER_PRIORITY


def _clock_of(stream: torch.Stream) -> StreamClock:
    return _machine.current().clock.stream(stream.device_index, stream.stream_id)


def _check_assert(index: int) -> None:
    """Raise torch.AcceleratorError if a kernel of the device has asserted."""
    _machine.current().meters[index].check_assert()


def _end(stream: torch.Stream) -> float:
    """When the work ends that has been launched on the stream, or now if that has ended."""
    now = _machine.current().clock.now(stream.device_index)
    return max(now, _clock_of(stream).free_at)


class Event(torch.Event):
    """A moment in a stream, as torch.cuda.Event: when all earlier work of the stream is done.

    The moment is known as soon as the event is recorded.
    """

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> "Event":
        return super().__new__(cls, device=names.INNER, enable_timing=enable_timing)

    def __init__(self, enable_timing: bool = False, *args: bool, **kwargs: bool):
        self._timing = enable_timing
        # The device's index, and the simulated time; None before `record`.
        self._index: int | None = None
        self._time: float | None = None

    @property
    def device(self) -> torch.device | None:
        """The device on which the event was recorded; None before that."""
        if self._index is None:
            return None
        return names.show(torch.device(names.INNER, self._index))

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record the event in a stream, or in the current stream of the current device.

        Raises RuntimeError if the event was recorded on another device before.
        """
        stream = current_stream() if stream is None else stream
        if self._index not in (None, stream.device_index):
            # CUDA's wording.
            raise RuntimeError(
                f"Event device {self._index} does not match recording stream's device "
                f"{stream.device_index}."
            )
        self._index = stream.device_index
        self._time = _end(stream)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Make later work of a stream wait for the event, by default the current stream.

        Does nothing for an event that was not recorded.
        """
        if self._time is not None:
            stream = current_stream() if stream is None else stream
            _clock_of(stream).delay(self._time)

    def query(self) -> bool:
        """Whether the event has happened. Asking takes the host LAUNCH_OVERHEAD."""
        if self._time is None:
            return True
        _check_assert(self._index)
        return _machine.current().clock.has_passed(self._time)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        if self._time is not None:
            _check_assert(self._index)
            _machine.current().clock.wait_host(self._time)

    def elapsed_time(self, end_event: "Event") -> float:
        """Simulated milliseconds from this event to `end_event`.

        Raises ValueError if an event has no timing, is not recorded, or has not happened.
        """
        events = (self, end_event)
        # CUDA's wording.
        if not all(event._timing for event in events):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if any(event._time is None for event in events):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        _check_assert(self._index)
        now = _machine.current().clock.now(self._index)
        if any(event._time > now for event in events):
            raise ValueError("Both events must be completed before calculating elapsed time.")
        return (end_event._time - self._time) * 1e3

    def __repr__(self) -> str:
        if self._time is None:
            return f"<torch.{names.shown_type()}.Event uninitialized>"
        name = f"torch.{names.shown_type()}.Event"
        return f"<{name} device={self.device} simulated time={self._time:.9f} s>"


def default_stream(device: DeviceLike = None) -> Stream:
    """The device's default stream."""
    return Stream(stream_id=DEFAULT, device_index=meter_of(device).index)


def current_stream(device: DeviceLike = None) -> Stream:
    """This thread's current stream for the device: the default stream, unless it was set."""
    stream = _machine.current().clock.current_streams()[meter_of(device).index]
    return Stream(stream_id=stream.number, device_index=stream.device)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream the current stream of its device, and its device the current one.

    None changes nothing. Both settings are this thread's.
    """
    if stream is None:
        return
    clock = _machine.current().clock
    streams = list(clock.current_streams())
    streams[stream.device_index] = _clock_of(stream)
    clock.set_streams(streams)
    _machine.set_current_index(stream.device_index)


class StreamContext:
    """`with torch.vgpu.stream(side):` makes `side` the current stream within the block.

    Its device becomes the current device. With None the block changes nothing.
    """

    def __init__(self, stream: torch.Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        # The block can outlive the machine.
        self._clock = _machine.current().clock
        self._streams = self._clock.current_streams()
        self._index = _machine.current_index()
        set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self._clock.set_streams(self._streams)
            _machine.set_current_index(self._index)


def stream_class(original: type[torch.Stream]) -> type[torch.Stream]:
    """A class that replaces torch.Stream: a call can make a virtual GPU's stream."""

    def is_virtual(device: DeviceLike = None, **ids: int) -> bool:
        if ids.get("device_type") is not None:
            return ids["device_type"] == DEVICE_TYPE
        return _is_virtual(device)

    return class_by_device(original, is_virtual, Stream)


def event_class(original: type[torch.Event]) -> type[torch.Event]:
    """A class that replaces torch.Event: a call can make a virtual GPU's event."""

    def is_virtual(device: DeviceLike = None, **options: bool) -> bool:
        return _is_virtual(device)

    def make(device: DeviceLike = None, **options: bool) -> Event:
        return Event(**options)

    return class_by_device(original, is_virtual, make)


def _is_virtual(device: DeviceLike) -> bool:
    """Whether a generic call means a virtual GPU: None and an index are the accelerator's."""
    if device is None or isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and names.is_virtual(accelerator)
    return names.is_virtual(torch.device(device))
