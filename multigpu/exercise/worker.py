"""Starts the process that forks students' processes, within bubblewrap or beside it."""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from multigpu.exercise import processes
from multigpu.exercise.budget import SECONDS
from multigpu.exercise.session import CannotRun, Limits, Session
from multigpu.launch import sandbox

START_SECONDS = 180  # torch's and TensorFlow's import from a slow disk
MEMORY_INTERVAL = 0.1  # seconds between two looks at the memory of all sessions
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Worker:
    """A process that has imported torch and forks students' processes.

    With a sandbox, it runs within bubblewrap; without, on the student's own machine, only the
    processes are apart.
    """

    def __init__(
        self, bwrap: str | None, limits: Limits | None = None, imports: Sequence[str] = ()
    ):
        """Begin to start it. `bwrap` is the path of bubblewrap; None for no sandbox."""
        self.limits = limits or Limits()
        self.isolated = bwrap is not None
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        module = [sys.executable, "-B", "-m", "multigpu.exercise.fork_server"]
        mode = "isolated" if bwrap else "apart"
        command = [*module, str(theirs.fileno()), mode, *imports]
        if bwrap:
            command = [bwrap, *sandbox.isolation(), "--", *command]
        # A pipe that nobody reads could fill.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=_environment(self.isolated),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()
        self._control.settimeout(START_SECONDS)
        self._ready = False
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        threading.Thread(target=_watch_memory, args=(weakref.ref(self),), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Wait for the imports. Raises CannotRun if the process does not start."""
        with self._lock:
            self._ready = self._ready or self._answer() == b"r"
            if not self._ready:
                self._process.kill()
                self._process.wait()
                self._errors.seek(0)
                text = self._errors.read().decode(errors="replace").strip()
                reason = text.splitlines()[-1] if text else "no reason given"
                where = "in the sandbox" if self.isolated else "for the checks"
                raise CannotRun(f"the process {where} does not start: {reason}")

    def _answer(self) -> bytes:
        try:
            return self._control.recv(1)
        except OSError:
            return b""

    def session(self, seconds: float = SECONDS) -> Session:
        """A new process for a student's code; it ends after `seconds`. Raises CannotRun."""
        message = {"disk": self.limits.disk, "processes": self.limits.processes}
        self.wait_until_ready()
        with self._lock:
            ours, theirs = socket.socketpair()
            session = Session(self.limits, seconds, ours)
            handed = [session.their_socket.fileno(), session.their_output, theirs.fileno()]
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                socket.send_fds(self._control, [json.dumps(message).encode()], handed)
                started = self._answer()
            except OSError:
                started = b""
            theirs.close()
        session.begin()
        if started != b"s":
            session.close()
            raise CannotRun("the process that starts the students' processes has ended")
        session.pid = _sender(ours)
        self._sessions.add(session)
        return session

    def check_memory(self) -> None:
        """Stop all sessions if they use more than the limit together.

        They belong to one check: a worker runs one check at a time.
        """
        limit = self.limits.memory
        watched = [session for session in list(self._sessions) if session.watched]
        if processes.exceeds([session.watched for session in watched], limit):
            for session in watched:
                session.stop("Memory", f"more than {limit >> 20:,} MiB")

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process and, with a sandbox, all that runs in it."""
        for session in list(self._sessions):
            session.close()
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()


def _sender(connection: socket.socket) -> int:
    """The process that sent the first byte, as this process sees it; 0 if unknown."""
    connection.settimeout(10)
    try:
        _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
    except OSError:
        return 0
    return CREDENTIALS.unpack(ancillary[0][2])[0] if ancillary else 0


def _watch_memory(reference: "weakref.ref[Worker]") -> None:
    while True:
        worker = reference()
        if worker is None or worker.ended:
            return
        worker.check_memory()
        del worker
        time.sleep(MEMORY_INTERVAL)


def _environment(isolated: bool) -> dict[str, str]:
    settings = {
        # A fork copies the page tables. With pages of 2 MiB it takes a tenth of the time.
        # glibc uses such pages in malloc alone, so Python's objects must come from malloc.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    if isolated:
        return settings | {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return dict(os.environ) | settings
