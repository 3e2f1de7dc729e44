"""Runs a student's code in a process of its own, under limits, and gets plain data from it."""

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from multigpu.errors import UserError
from multigpu.exercise import processes
from multigpu.exercise.channel import Channel, Closed
from multigpu.exercise.hub import Hub
from multigpu.exercise.plain import NotPlain

STARVED = 0.2  # share of the time limit; who waited longer for a core is tried again alone
JOIN_SECONDS = 5.0  # for the last output of a process that was killed


@dataclass(frozen=True)
class Limits:
    """What a student's code may use."""

    memory: int = 3 << 30  # bytes of all processes of a check together
    disk: int = 64 << 20  # bytes in /tmp
    processes: int = 32  # at a time, of one rank
    output: int = 16 << 10  # bytes that are kept of what a rank prints
    flood: int = 64 << 20  # bytes after which a rank that prints is stopped


class CannotRun(UserError):
    """The machine cannot run a student's process, which is not the student's fault."""


class StudentError(Exception):
    """The student's code raised an exception, was stopped, or returned no plain data.

    kind     the exception's type, or "Timeout", "Memory", "Output", "Collective" (a call that
             would hang on a cluster), "Died", "NotPlain"
    lines    the lines of the student's cells that it passed through
    """

    def __init__(self, kind: str, text: str, lines: Sequence[str] = ()):
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.lines = list(lines)


class Session:
    """A student's process. Used by one thread; `stop` may come from any."""

    def __init__(self, limits: Limits, seconds: float, end: socket.socket):
        """Prepare both sides. Closing `end` ends the process and all that it has started."""
        self.limits = limits
        self.pid = 0  # of the process; 0 if unknown
        self.printed = bytearray()
        self.stopped: tuple[str, str] | None = None
        self.starved = False
        self._hub: Hub | None = None
        self._rank = 0
        ours, self.their_socket = socket.socketpair()
        self._channel = Channel(ours)
        self._output, self.their_output = os.pipe()
        self._end: socket.socket | None = end
        self._lock = threading.Lock()
        self._watch = threading.Timer(seconds, self._late, [seconds])
        self._watch.daemon = True
        self._reader = threading.Thread(target=self._read_output, daemon=True)

    def begin(self) -> None:
        """The other side has its sockets: close ours of them, and watch it."""
        self.their_socket.close()
        os.close(self.their_output)
        self._watch.start()
        self._reader.start()

    def _read_output(self) -> None:
        read = 0
        while part := os.read(self._output, 65536):
            room = self.limits.output - len(self.printed)
            self.printed += part[: max(0, room)]
            read += len(part)
            if read > self.limits.flood:
                self.stop("Output", f"more than {self.limits.flood >> 20} MiB printed")
        os.close(self._output)

    @property
    def watched(self) -> int:
        """The process, whose descendants are also the session's; 0 if unknown or ended."""
        return self.pid if self._end is not None else 0

    def run(self, name: str, source: str, given: bool = False) -> None:
        """Run a cell's text, which is given or an answer. Raises StudentError."""
        self._ask({"do": "run", "name": name, "source": source, "given": given})

    def join(self, hub: Hub, rank: int) -> None:
        """Make this process rank `rank` of a torch.distributed world."""
        self._hub = hub
        self._rank = rank
        self._ask({"do": "world", "rank": rank, "size": hub.size})

    def call(self, function: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call a function of the student's. Raises StudentError."""
        message = {"do": "call", "function": function}
        reply = self._ask(message | {"arguments": list(arguments), "keywords": keywords})
        return reply.get("value")

    def value(self, name: str) -> Any:
        """A variable of the student's. Raises StudentError."""
        return self._ask({"do": "value", "name": name}).get("value")

    def _ask(self, message: dict) -> dict:
        try:
            self._channel.send(message)
            while True:
                received = self._channel.receive()
                if type(received) is not dict:
                    raise NotPlain("not a message")
                if "reply" in received:
                    break
                if self._hub is None or type(received.get("ask")) is not dict:
                    raise NotPlain("not a message")
                self._collective(received["ask"], received.get("number"))
        except Closed:
            kind, text = self.stopped or ("Died", "the process ended")
            raise StudentError(kind, text) from None
        except (NotPlain, ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            raise StudentError("NotPlain", str(error)) from None
        if self.stopped is not None:
            raise StudentError(*self.stopped)
        reply = received["reply"]
        error = reply.get("error") if type(reply) is dict else {"type": "NotPlain"}
        if error is not None:
            error = error if type(error) is dict else {}
            kind, text = str(error.get("type", "Error")), str(error.get("text", ""))
            lines = error.get("lines")
            raise StudentError(kind, text, map(str, lines) if type(lines) is list else ())
        return reply

    def _collective(self, request: dict, number: Any) -> None:
        def answer(message: dict) -> None:
            if "error" in message:
                # On a cluster the rank would wait for ever, or get wrong values.
                self.stop("Collective", message["error"])
                return
            with suppress(Closed, NotPlain):  # the rank has ended
                self._channel.send(message | {"number": number})

        self._hub.ask(self._rank, request, answer)

    def _late(self, seconds: float) -> None:
        ran, waited = core_seconds(self.pid)
        # Who had a core's whole time waited for processes of its own.
        self.starved = waited > seconds * STARVED and ran < seconds * (1 - STARVED)
        waits = self._hub.unanswered() if self._hub else ""
        hangs = f": {waits}: on a cluster, this hangs" if waits else ""
        self.stop("Timeout", f"no result after {seconds:.3g} s{hangs}")

    def stop(self, kind: str, text: str) -> None:
        """End the process now; the call that it is in raises StudentError(kind, text)."""
        self.stopped = self.stopped or (kind, text)
        self.release()

    def release(self) -> None:
        """End the process and all that it has started; do not wait for it."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end.close()
            # Who waits for a reply waits no longer, also if the process does not end.
            with suppress(OSError):
                self._channel.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and all that it has started; then `printed` is complete."""
        self._watch.cancel()
        self.release()
        self._channel.close()
        if self._reader.ident is not None:
            self._reader.join(JOIN_SECONDS)


def core_seconds(pid: int) -> tuple[float, float]:
    """Seconds that the threads of a process and its children ran, and one could and did not.

    The first is a sum, the second that of the thread that waited longest; 0 if unknown. They
    are in schedstat (Documentation/scheduler/sched-stats.rst).
    """
    ran, waited = 0.0, 0.0
    for folder in processes.family(pid):
        for file in folder.glob("task/*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                words = file.read_text().split()
                ran += int(words[0]) * 1e-9
                waited = max(waited, int(words[1]) * 1e-9)
    return ran, waited
