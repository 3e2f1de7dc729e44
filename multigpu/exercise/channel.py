"""Frames of plain data over a socket. The sender may be hostile."""

import socket
import struct
import threading
from typing import Any

from multigpu.exercise import plain

LENGTHS = struct.Struct("!II")
MAX_HEADER = 1 << 20
MAX_BODY = 64 << 20


class Closed(ConnectionError):
    """The other side has ended."""


class Channel:
    """Sends and receives values. Threads may send at the same time; one thread receives."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._sending = threading.Lock()

    def send(self, value: Any) -> int:
        """Send a value. Returns the bytes of its tensors. Raises NotPlain, Closed."""
        header, body = plain.encode(value)
        kinds = (header, MAX_HEADER, "numbers, texts and lists"), (body, MAX_BODY, "tensors")
        for data, limit, content in kinds:
            if len(data) > limit:
                text = f"{len(data):,} bytes of {content} at once: the limit is {limit:,}"
                raise plain.NotPlain(text)
        try:
            with self._sending:
                self.connection.sendall(LENGTHS.pack(len(header), len(body)) + header + body)
        except OSError:
            raise Closed("the other process has ended") from None
        return len(body)

    def receive(self) -> Any:
        """The next value. Raises NotPlain, Closed."""
        header, body = LENGTHS.unpack(self._read(LENGTHS.size))
        if header > MAX_HEADER or body > MAX_BODY:
            raise plain.NotPlain(f"a frame of {header + body:,} bytes is too large")
        return plain.decode(self._read(header), self._read(body))

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self.connection.recv(min(length - len(parts), 1 << 20))
            except OSError:
                part = b""
            if not part:
                raise Closed("the other process has ended")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.connection.close()
