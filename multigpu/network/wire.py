"""The bytes that this process has sent, counted by the kernel for each TCP connection."""

import ctypes
import os
import socket
import struct
import sys

from multigpu.errors import UserError

# Offsets in struct tcp_info of linux/tcp.h: three 64-bit counters, and one of 32 bits with the
# bytes that are written but not sent yet. A kernel older than 4.19 gives a shorter struct.
BYTES_ACKED = 120
BYTES_SENT = 200
BYTES_RETRANS = 208
NOTSENT_BYTES = 144


def bytes_sent() -> int:
    """Bytes of payload that this process has given to its open TCP connections.

    Each byte counts once. Use the difference of two calls. A connection that is closed between
    them is missing from the second, so the difference can be too small, or negative. NCCL's
    bytes through shared memory or InfiniBand are not counted; gloo's bytes are all counted.
    The sockets are not changed.
    Raises UserError on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"only the Linux kernel counts the bytes that a connection has sent, but this "
            f"system is {sys.platform}: run this on Linux."
        )
    libc = ctypes.CDLL(None)
    total = 0
    # os.dup gives a socket two descriptors: count each socket once.
    seen: set[str] = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            # The descriptor was closed after the list was made.
            continue
        if name.startswith("socket:") and name not in seen:
            seen.add(name)
            total += _bytes_sent_by_socket(libc, int(descriptor))
    return total


def _bytes_sent_by_socket(libc: ctypes.CDLL, descriptor: int) -> int:
    """The bytes that one socket has sent; 0 for a socket that is not TCP.

    It calls getsockopt directly, because a Python socket made from the descriptor would set
    Python's default timeout on the socket.
    """
    info = ctypes.create_string_buffer(512)
    size = ctypes.c_uint32(512)
    if libc.getsockopt(
        descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)
    ):
        return 0
    return payload_bytes(info.raw[: size.value])


def payload_bytes(info: bytes) -> int:
    """The payload bytes in a struct tcp_info: sent − retransmitted + waiting to be sent.

    A short struct has only the acknowledged bytes: bytes that are not acknowledged yet are
    missing, and the opening of the connection counts as one byte.
    """

    def read(offset: int) -> int:
        return struct.unpack_from("=Q", info, offset)[0]

    if len(info) >= BYTES_RETRANS + 8:
        waiting = struct.unpack_from("=I", info, NOTSENT_BYTES)[0]
        return read(BYTES_SENT) - read(BYTES_RETRANS) + waiting
    return read(BYTES_ACKED) if len(info) >= BYTES_ACKED + 8 else 0
