"""The kernel's count equals the bytes sent, and counting does not change a socket."""

import gc
import os
import socket
import sys

import pytest

from multigpu.errors import UserError
from multigpu.network import wire


@pytest.fixture(autouse=True)
def nothing_is_collected():
    """What earlier tests left in a cycle, such as a store, closes its connections before."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pair():
    """Both ends of a TCP connection to this machine."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def transfer(sender: socket.socket, receiver: socket.socket, count: int) -> None:
    while count:
        chunk = min(count, 10_000)
        sender.sendall(bytes(chunk))
        count -= len(receiver.recv(chunk, socket.MSG_WAITALL))


def test_each_byte_counts_once(pair):
    before = wire.bytes_sent()
    transfer(*pair, 100_000)
    assert wire.bytes_sent() - before == 100_000
    transfer(*reversed(pair), 7)
    assert wire.bytes_sent() - before == 100_007


def test_bytes_that_wait_to_be_sent_count(pair):
    client, _ = pair
    before = wire.bytes_sent()
    written = 0
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            written += client.send(bytes(100_000))
    assert written > 0 and wire.bytes_sent() - before == written


def test_received_bytes_do_not_count(pair):
    client, accepted = pair
    child = os.fork()
    if child == 0:
        accepted.sendall(bytes(5000))
        os._exit(0)
    accepted.close()
    before = wire.bytes_sent()
    assert len(client.recv(5000, socket.MSG_WAITALL)) == 5000
    assert wire.bytes_sent() == before
    os.waitpid(child, 0)


def test_other_sockets_and_files_do_not_count(pair, tmp_path):
    before = wire.bytes_sent()
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
        assert wire.bytes_sent() == before


def test_a_closed_connection_does_not_count(pair):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        before = wire.bytes_sent()
        accepted, _ = server.accept()
        with accepted:
            transfer(client, accepted, 50)
        assert wire.bytes_sent() - before == 50
    assert wire.bytes_sent() == before


def test_other_systems_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="darwin"):
        wire.bytes_sent()
