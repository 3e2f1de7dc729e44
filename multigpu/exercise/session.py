"""Runs a student's code in a process of its own, under limits, and gets plain data from it."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import multigpu
from multigpu.errors import UserError
from multigpu.exercise.channel import Channel, Closed
from multigpu.exercise.hub import Hub
from multigpu.exercise.plain import NotPlain


@dataclass(frozen=True)
class Limits:
    """What a student's process may use.

    seconds     for one call
    memory      bytes of all processes of a question together
    disk        bytes in /tmp
    processes   at a time
    output      bytes that are kept of what it prints
    """

    seconds: int = 20
    memory: int = 2 << 30
    disk: int = 64 << 20
    processes: int = 32
    output: int = 64 << 10


class StudentError(Exception):
    """The student's code raised an exception, was stopped, or returned no plain data.

    kind     the exception's type, or "Timeout", "Memory", "Collective" (a call that would hang
             on a cluster), "Died", "NotPlain"
    lines    the lines of the student's cells that it passed through
    """

    def __init__(self, kind: str, text: str, lines: Sequence[str] = ()):
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind = kind
        self.text = text
        self.lines = list(lines)


class Worker:
    """A process that has imported torch and forks students' processes.

    With a sandbox, it runs within bubblewrap; without, on the student's own machine, only the
    processes are apart.
    """

    def __init__(self, bwrap: str | None, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.isolated = bwrap is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module = [sys.executable, "-B", "-m", "multigpu.exercise.worker"]
        command = [*module, str(theirs.fileno()), "isolated" if bwrap else "apart"]
        if bwrap:
            command = [bwrap, *isolation(), "--", *command]
        environment = _environment()
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        theirs.close()
        self.control = ours
        self.control.settimeout(120)
        self.ready = False

    def wait_until_ready(self) -> None:
        """Wait for torch's import. Raises UserError if the sandbox does not start."""
        if self.ready:
            return
        try:
            self.ready = bool(self.control.recv(16))
        except OSError:
            self.ready = False
        if not self.ready:
            self.process.kill()
            message = self.process.stderr.read().decode(errors="replace").strip()
            raise UserError(f"the sandbox does not start: {message or 'no reason given'}")

    def session(self) -> "Session":
        """A new process for a student's code."""
        self.wait_until_ready()
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        lifeline, held = os.pipe()
        limits = self.limits
        message = {
            "disk": limits.disk,
            "processes": limits.processes,
            "seconds": 10 * limits.seconds,
        }
        descriptors = [theirs.fileno(), printed, lifeline]
        socket.send_fds(self.control, [json.dumps(message).encode()], descriptors)
        theirs.close()
        os.close(printed)
        os.close(lifeline)
        return Session(self, Channel(ours), output, held)

    def close(self) -> None:
        """End the worker and, with a sandbox, all that runs in it."""
        self.control.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@dataclass
class Session:
    """One student's process.

    held   closing this pipe ends the process and all that it has started
    """

    worker: Worker
    channel: Channel
    output: int
    held: int
    printed: bytearray = field(default_factory=bytearray)
    stopped: tuple[str, str] | None = None
    hub: Hub | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _read_output(self) -> None:
        while part := os.read(self.output, 65536):
            room = self.worker.limits.output - len(self.printed)
            self.printed += part[: max(0, room)]
        os.close(self.output)

    def run(self, name: str, source: str) -> None:
        """Run a cell's text. Raises StudentError."""
        self._ask({"do": "run", "name": name, "source": source})

    def load(self, names: dict[str, Any]) -> None:
        """Give the process these objects; only on the student's own machine."""
        import cloudpickle

        data = torch.frombuffer(bytearray(cloudpickle.dumps(names)), dtype=torch.uint8)
        self._ask({"do": "load", "data": data})

    def join(self, hub: Hub, rank: int) -> None:
        """Make this process rank `rank` of a torch.distributed world."""
        self.hub = hub
        self.rank = rank
        self._ask({"do": "world", "rank": rank, "size": hub.size})

    def call(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the student's. Raises StudentError."""
        reply = self._ask(
            {"do": "call", "function": function, "arguments": arguments, "keywords": keywords}
        )
        return reply.get("value")

    def _ask(self, message: dict) -> dict:
        seconds = self.worker.limits.seconds
        late = ("Timeout", f"no result after {seconds} s")
        watch = threading.Timer(seconds, self.stop, late)
        watch.daemon = True
        watch.start()
        try:
            self.channel.send(message)
            while True:
                received = self.channel.receive()
                if type(received) is not dict:
                    raise NotPlain("not a message")
                if "reply" in received:
                    break
                if self.hub is None or type(received.get("ask")) is not dict:
                    raise NotPlain("not a message")
                self._collective(received)
        except Closed:
            kind, text = self.stopped or ("Died", "the process ended")
            raise StudentError(kind, text) from None
        except (NotPlain, KeyError, TypeError) as error:
            self.close()
            raise StudentError("NotPlain", str(error)) from None
        finally:
            watch.cancel()
        reply = received["reply"]
        error = reply.get("error") if type(reply) is dict else {"type": "NotPlain"}
        if error is not None:
            texts = [str(error.get(name, "")) for name in ("type", "text")]
            lines = error.get("lines")
            raise StudentError(*texts, [str(line) for line in lines or ()])
        return reply

    def _collective(self, received: dict) -> None:
        number = received["number"]

        def answer(message: dict) -> None:
            if "error" in message:
                # On a cluster the rank would wait for ever, or get wrong values.
                self.stop("Collective", message["error"])
                return
            try:
                self.channel.send(message | {"number": number})
            except (Closed, NotPlain):
                pass  # the rank has ended

        self.hub.ask(self.rank, received["ask"], answer)

    def stop(self, kind: str, text: str) -> None:
        """End the process now; the call that it is in raises StudentError(kind, text)."""
        self.stopped = self.stopped or (kind, text)
        self._release()

    def _release(self) -> None:
        held, self.held = self.held, -1
        if held >= 0:
            os.close(held)

    def close(self) -> None:
        """End the process and all that it has started."""
        self._release()
        self.channel.close()


def isolation() -> list[str]:
    """bubblewrap's arguments: Python, its packages and this library, read-only; no network.

    root needs no user namespace. There, the worker becomes an ordinary user, because limits do
    not hold for root.
    """
    words = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if os.getuid() == 0:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    library = Path(multigpu.__file__).parent
    shown = {Path(name) for name in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")}
    shown |= {Path(sys.prefix), Path(sys.base_prefix), library}
    parents = {parent for path in shown for parent in path.parents}
    for folder in sorted(parents - {Path("/")}):
        if not any(folder == path or path in folder.parents for path in shown):
            words += ["--perms", "0755", "--dir", str(folder)]
    for path in sorted(shown):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    return [*words, "--chdir", "/tmp"]


def _environment() -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(multigpu.__file__).parent.parent),
    }
