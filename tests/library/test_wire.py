"""Bytes that the kernel counts are those that were sent, and looking at a socket leaves it as it was."""

import os
import socket
import struct
import sys

import pytest

from multigpu import wire
from multigpu.errors import UserError


@pytest.fixture
def pair():
    """Both ends of a TCP connection to this machine."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        there, _ = server.accept()
        with there:
            yield here, there


def through(here: socket.socket, there: socket.socket, count: int) -> None:
    while count:
        piece = min(count, 10_000)
        here.sendall(bytes(piece))
        count -= len(there.recv(piece, socket.MSG_WAITALL))


def test_each_byte_counts_once(pair):
    before = wire.sent()
    through(*pair, 100_000)
    assert wire.sent() - before == 100_000
    through(*reversed(pair), 7)
    assert wire.sent() - before == 100_007


def test_what_the_other_side_has_no_room_for_counts(pair):
    here, _ = pair
    before, given = wire.sent(), 0
    here.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            given += here.send(bytes(100_000))
    assert given > 0 and wire.sent() - before == given


def test_what_is_received_from_others_does_not_count(pair):
    here, there = pair
    child = os.fork()
    if child == 0:
        there.sendall(bytes(5000))
        os._exit(0)
    there.close()
    before = wire.sent()
    assert len(here.recv(5000, socket.MSG_WAITALL)) == 5000
    assert wire.sent() == before
    os.waitpid(child, 0)


def test_a_socket_under_two_numbers_counts_once(pair):
    through(*pair, 1000)
    before = wire.sent()
    with pair[0].dup():
        assert wire.sent() == before


def test_other_sockets_and_files_do_not_count(pair, tmp_path):
    before = wire.sent()
    one, other = socket.socketpair()
    with (
        one,
        other,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        open(tmp_path / "file", "w") as file,
    ):
        one.sendall(b"unix")
        udp.sendto(b"udp", pair[0].getsockname())
        file.write("file")
        assert wire.sent() == before


def test_a_closed_connection_is_lost(pair):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
    ):
        before = wire.sent()
        there, _ = server.accept()
        with there:
            through(here, there, 50)
        assert wire.sent() - before == 50
    assert wire.sent() == before


def test_looking_changes_nothing(pair):
    here, there = pair
    numbers = os.listdir("/proc/self/fd")
    socket.setdefaulttimeout(3)
    try:
        wire.sent()
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(here.fileno()) and os.get_blocking(there.fileno())
    assert os.listdir("/proc/self/fd") == numbers
    through(here, there, 10)


def test_a_short_struct_tells_what_was_acknowledged():
    info = bytearray(256)
    for offset, value in ((120, 900), (200, 1100), (208, 100)):
        struct.pack_into("=Q", info, offset, value)
    assert wire.counted(bytes(info)) == 1000
    struct.pack_into("=I", info, 144, 5)
    assert wire.counted(bytes(info)) == 1005
    assert wire.counted(bytes(info[:200])) == 900
    assert wire.counted(bytes(info[:104])) == 0


def test_elsewhere_it_says_why_not(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="darwin"):
        wire.sent()
