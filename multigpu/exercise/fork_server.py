"""The program that has imported torch and forks the students' processes, within the sandbox.

Each fork has namespaces of its own: it sees no other process, no network and an empty /tmp.
When it ends, the kernel ends all processes that it has started.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from multigpu.exercise import seccomp
from multigpu.exercise.channel import Channel
from multigpu.exercise.student import serve

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
MODULES = (
    "torch",
    "torch._dynamo",  # DDP and optimizers import it, which takes a second
    "torch.distributed",
    "torch.nn.parallel",
    "multigpu.exercise.student",
    "multigpu.exercise.ranks",
)


class CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def main(control: int, isolated: bool, imports: Sequence[str]) -> None:
    """Fork a student's process for each message; its sockets and pipes come with it.

    control    the socket of the messages
    isolated   whether this is the sandbox; else the student's own machine
    imports    modules to import beside torch
    """
    if isolated and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    import torch

    if isolated:
        # An answer must not read or write the memory of this process, whose forks come after.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for name in (*MODULES, *imports):
        importlib.import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended children
    connection = socket.socket(fileno=control)
    connection.sendall(b"r")
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 4096, 3)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _student(json.loads(message), *descriptors, isolated)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"s")


def _student(limits: dict, channel: int, output: int, end: int, isolated: bool) -> NoReturn:
    """Start the student's process, and end it when the other side of `end` is closed."""
    try:
        connection = socket.socket(fileno=end)
        connection.sendall(b"p")  # its receiver learns this process's id
        libc = ctypes.CDLL(None, use_errno=True)
        if isolated:
            _unshare(libc)
        init = os.fork()
        if init == 0:
            connection.close()
            if isolated:
                _own_tmp(libc, limits["disk"])
            else:
                os.setpgid(0, 0)
            child = os.fork()
            if child == 0:
                if isolated:
                    _drop(libc, limits)
                _serve(channel, output)
            os.close(channel)
            os.close(output)
            while os.wait()[0] != child:
                pass
            os._exit(0)
        if not isolated:
            # Both set the group: either may be the first that needs it.
            with suppress(OSError):
                os.setpgid(init, init)
        os.close(channel)
        os.close(output)
        connection.recv(1)
        if isolated:
            os.kill(init, signal.SIGKILL)  # the first process of its namespace
        else:
            os.killpg(init, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except BaseException as error:
        print(f"worker: {error!r}", file=sys.__stderr__, flush=True)
    os._exit(0)


def _unshare(libc: ctypes.CDLL) -> None:
    uid, gid = os.getuid(), os.getgid()
    # A process that has changed its user is not dumpable, and cannot write its own uid_map.
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    if libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _own_tmp(libc: ctypes.CDLL, size: int) -> None:
    """An empty /tmp and /dev/shm, no /dev/zero and no terminals.

    The kernel's memory for an empty file is about 1 KiB, which `size` does not limit. Shared
    memory that comes from /dev/zero is seen in no process once it is not mapped; see seccomp.
    """
    os.chdir("/")
    # /dev/pts becomes empty: a machine has 4,096 pseudo-terminals for all its users.
    for folder, most in ((b"/tmp", size), (b"/dev/shm", size), (b"/dev/pts", 4096)):
        options = f"size={most},nr_inodes={MAX_FILES},mode=1777".encode()
        if libc.mount(b"tmpfs", folder, b"tmpfs", 6, options):  # no set-uid files, no devices
            raise OSError(ctypes.get_errno(), f"mount {folder.decode()}")
    if libc.mount(b"/dev/null", b"/dev/zero", None, MS_BIND, None):
        raise OSError(ctypes.get_errno(), "mount /dev/zero")
    libc.mount(b"proc", b"/proc", b"proc", 14, None)  # refused where /proc has covers
    os.chdir("/tmp")


def _drop(libc: ctypes.CDLL, limits: dict) -> None:
    os.setsid()
    header = CapabilityHeader(0x20080522, 0)
    none = (CapabilityData * 2)()
    libc.capset(ctypes.byref(header), ctypes.byref(none))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CPU, limits["seconds"]),
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
