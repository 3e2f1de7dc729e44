"""How many bytes has this process sent? As the kernel counts them, for each of its TCP connections."""

import ctypes
import os
import socket
import struct
import sys

from multigpu.errors import UserError

# Where struct tcp_info of linux/tcp.h has three 64-bit counters. A kernel older than 4.19 gives a shorter struct.
BYTES_ACKED, BYTES_SENT, BYTES_RETRANS = 120, 200, 208
NOT_SENT_YET = 144  # and one of 32 bits: written, but the other side has no room for it


def sent() -> int:
    """Bytes of payload that this process has given to its open TCP connections, each byte once.

    Take the difference of two calls. A connection that was closed between them is not counted in the second, so the
    difference can be too small, or negative. What goes through shared memory or InfiniBand never passes here, and
    NCCL may use either; gloo's bytes all do. The sockets are only looked at.
    Raises UserError elsewhere than on Linux.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"bytes are counted by the Linux kernel, and this is {sys.platform}: run this on Linux."
        )
    libc, total, seen = ctypes.CDLL(None), 0, set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # closed since the list was made
            continue
        if (
            name.startswith("socket:") and name not in seen
        ):  # os.dup gives a socket two numbers
            seen.add(name)
            total += _of(libc, int(fd))
    return total


def _of(libc: ctypes.CDLL, fd: int) -> int:
    """The bytes that one socket has sent; 0 for a socket that is not TCP.

    By getsockopt itself: a socket object made from the number would take Python's default timeout over to the socket.
    """
    info, size = ctypes.create_string_buffer(512), ctypes.c_uint32(512)
    if libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)):
        return 0
    return counted(info.raw[: size.value])


def counted(info: bytes) -> int:
    """The bytes that a struct tcp_info tells: sent, less those sent again, and those that wait to be sent.

    A short struct tells only what was acknowledged: less than what was sent by what is still under way. It counts the
    opening of the connection as one byte.
    """

    def read(offset: int) -> int:
        return struct.unpack_from("=Q", info, offset)[0]

    if len(info) >= BYTES_RETRANS + 8:
        return (
            read(BYTES_SENT)
            - read(BYTES_RETRANS)
            + struct.unpack_from("=I", info, NOT_SENT_YET)[0]
        )
    return read(BYTES_ACKED) if len(info) >= BYTES_ACKED + 8 else 0
