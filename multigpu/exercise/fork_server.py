"""The program that has imported torch and forks the students' processes, within the sandbox.

Each fork has namespaces of its own: it sees no other process, no network and an empty /tmp.
When it ends, the kernel ends all processes that it has started.
"""

import ctypes
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from multigpu.exercise import seccomp
from multigpu.exercise.channel import Channel
from multigpu.exercise.given import seal
from multigpu.exercise.student import serve
from multigpu.launch import sandbox

NEWNS = 0x00020000
NEWIPC = 0x08000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
NOBODY = 65534
MS_BIND = 4096
MAX_FILES = 10_000
MAX_OPEN = 64  # of a process; each can be a socket with a full buffer
REAP_MILLISECONDS = 50  # killed processes are waited for this often, until they have ended
MODULES = (
    "torch",
    "torch._dynamo",  # DDP and optimizers import it, which takes a second
    "torch.distributed",
    "torch.nn.parallel",
    "multigpu.exercise.student",
    "multigpu.exercise.ranks",
)


def main(control: int, isolated: bool, imports: Sequence[str]) -> None:
    """Fork a student's process for each message; its sockets and pipes come with it.

    control    the socket of the messages
    isolated   whether this is the sandbox; else the student's own machine
    imports    modules to import beside torch
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if isolated:
        seccomp.program(platform.machine())  # without a filter there is no sandbox
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            # The kernel counts pages of pipes and descriptors in messages by user.
            with suppress(OSError):  # within a container, that has fewer users
                os.setuid(os.stat("/proc/self/ns/pid").st_ino)
            if os.getuid() == 0:
                os.setuid(NOBODY)
        _own_process_namespace(libc)

    import torch

    for name in (*MODULES, *imports):
        importlib.import_module(name)
    torch.set_num_threads(1)
    seal()
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=control)
    connection.sendall(b"r")
    ForkServer(libc, connection, isolated).serve()


def _own_process_namespace(libc: ctypes.CDLL) -> None:
    """Continue as process 1 of a new PID namespace, and so be able to make one for each child.

    The process that was there before waits, and ends with the same exit code. Call this before
    the imports, which start threads: a process with threads gets no new user namespace.
    """
    _unshare(libc, NEWUSER | NEWPID)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


class ForkServer:
    """Forks students' processes, and ends each when the other side of its `end` is closed."""

    def __init__(self, libc: ctypes.CDLL, connection: socket.socket, isolated: bool):
        self.libc = libc
        self.connection = connection
        self.isolated = isolated
        self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if isolated else None
        self.poll = select.poll()
        self.processes: dict[int, int] = {}  # of each socket `end`
        self.ended: set[int] = set()  # processes that were killed, and not yet waited for

    def serve(self) -> None:
        """Work until the control socket is closed."""
        self.poll.register(self.connection, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll(REAP_MILLISECONDS if self.ended else None):
                if descriptor in self.processes:
                    self._end(descriptor)
                elif not self._start():
                    return
            self.ended = {pid for pid in self.ended if os.waitpid(pid, os.WNOHANG)[0] == 0}

    def _start(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self.connection, 4096, 3)
        if not message:
            return False
        channel, output, end = descriptors
        if self.isolated:
            # The next child is the first process of a new namespace.
            _check(self.libc.unshare(NEWPID), "unshare")
        pid = os.fork()
        if pid == 0:
            self._forget()
            _student(self.libc, json.loads(message), channel, output, end, self.isolated)
        if self.isolated:
            _check(self.libc.setns(self.namespace, NEWPID), "setns")
        else:
            # Both set the group: either may be the first that needs it.
            with suppress(OSError):
                os.setpgid(pid, pid)
        os.close(channel)
        os.close(output)
        self.processes[end] = pid
        self.poll.register(end, select.POLLIN)
        self.connection.sendall(b"s")
        return True

    def _forget(self) -> None:
        """Close what a student's process must not have."""
        self.connection.close()
        for descriptor in self.processes:
            os.close(descriptor)
        if self.namespace is not None:
            os.close(self.namespace)

    def _end(self, descriptor: int) -> None:
        self.poll.unregister(descriptor)
        os.close(descriptor)
        pid = self.processes.pop(descriptor)
        # A process that has ended keeps its number until it is waited for.
        if self.isolated:
            os.kill(pid, signal.SIGKILL)  # the first process of its namespace
        else:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.ended.add(pid)


def _student(
    libc: ctypes.CDLL, limits: dict, channel: int, output: int, end: int, isolated: bool
) -> NoReturn:
    """In the fork: isolate this process, answer the checks' messages, and exit."""
    try:
        with socket.socket(fileno=end) as connection:
            connection.sendall(b"p")  # its receiver learns this process's id
        if isolated:
            _unshare(libc, NEWUSER | NEWNS | NEWNET | NEWIPC)
            _own_tmp(libc, limits["disk"])
            _drop(libc, limits)
        else:
            os.setpgid(0, 0)
        _serve(channel, output)
    except BaseException as error:
        print(f"worker: {error!r}", file=sys.__stderr__, flush=True)
    os._exit(0)


def _check(result: int, call: str) -> None:
    """Raise OSError if a function of the C library has failed."""
    if result:
        raise OSError(ctypes.get_errno(), call)


def _unshare(libc: ctypes.CDLL, namespaces: int) -> None:
    """Enter new namespaces, one of users among them, in which this user keeps its number."""
    uid, gid = os.getuid(), os.getgid()
    # A process that has changed its user is not dumpable, and cannot write its own uid_map.
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    _check(libc.unshare(namespaces), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # An answer must not read or write the memory of this process.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _own_tmp(libc: ctypes.CDLL, size: int) -> None:
    """An empty /tmp and /dev/shm, no /dev/zero and no terminals.

    The kernel's memory for an empty file is about 1 KiB, which `size` does not limit. Shared
    memory that comes from /dev/zero is seen in no process once it is not mapped; see seccomp.
    What of Python and this library lies in /tmp stays there.
    """
    os.chdir("/")
    in_tmp = [path for path in sandbox.shown() if path.is_relative_to("/tmp")]
    handles = [os.open(path, os.O_PATH) for path in in_tmp]
    # /dev/pts becomes empty: a machine has 4,096 pseudo-terminals for all its users.
    for folder, most in ((b"/tmp", size), (b"/dev/shm", size), (b"/dev/pts", 4096)):
        options = f"size={most},nr_inodes={MAX_FILES},mode=1777".encode()
        # 6: no set-uid files, no devices
        _check(libc.mount(b"tmpfs", folder, b"tmpfs", 6, options), f"mount {folder.decode()}")
    for path, handle in zip(in_tmp, handles, strict=True):
        path.mkdir(parents=True, exist_ok=True)
        held = f"/proc/self/fd/{handle}".encode()
        _check(libc.mount(held, bytes(path), None, MS_BIND, None), f"mount {path}")
        os.close(handle)
    _check(libc.mount(b"/dev/null", b"/dev/zero", None, MS_BIND, None), "mount /dev/zero")
    _own_proc(libc)
    os.chdir("/tmp")


def _own_proc(libc: ctypes.CDLL) -> None:
    """A /proc with cpuinfo and meminfo alone, as they are now: later they tell of other ranks.

    The old one shows the other ranks, and the processes of the check before. A new one would
    need rights in the fork server's user namespace, which owns the namespace of processes.
    """
    texts = {name: Path(f"/proc/{name}").read_bytes() for name in ("cpuinfo", "meminfo")}
    # 14: no set-uid files, no devices, no programs; the folder and two files are three inodes
    _check(libc.mount(b"tmpfs", b"/proc", b"tmpfs", 14, b"size=4m,nr_inodes=3"), "mount /proc")
    for name, text in texts.items():
        Path(f"/proc/{name}").write_bytes(text)


def _drop(libc: ctypes.CDLL, limits: dict) -> None:
    os.setsid()
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(libc.capset(header, bytes(24)), "capset")
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, limit in (
        (resource.RLIMIT_CORE, 0),
        # Ranks share a user's whole number of these two: who takes all tells the others.
        (resource.RLIMIT_SIGPENDING, MAX_OPEN),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN),
    ):
        resource.setrlimit(name, (limit, limit))
    seccomp.refuse(libc)


def _serve(channel: int, output: int) -> NoReturn:
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        serve(Channel(socket.socket(fileno=channel)))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "isolated", sys.argv[3:])
