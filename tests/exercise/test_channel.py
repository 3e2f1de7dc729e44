"""Frames over a socket."""

import socket
import struct
import threading

import pytest
import torch

from multigpu.exercise.channel import MAX_BODY, MAX_HEADER, Channel, Closed
from multigpu.exercise.plain import NotPlain


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Channel(ours), Channel(theirs)
    ours.close()
    theirs.close()


def test_values_arrive_in_order(pair):
    ours, theirs = pair
    large = torch.arange(1_000_000)
    sender = threading.Thread(target=lambda: [ours.send(large), ours.send("last")])
    sender.start()

    assert torch.equal(theirs.receive(), large)
    assert theirs.receive() == "last"
    sender.join()


def test_the_end_of_the_other_side_is_an_error(pair):
    ours, theirs = pair
    ours.connection.sendall(b"\x00\x00")
    ours.close()

    with pytest.raises(Closed):
        theirs.receive()
    with pytest.raises(Closed):
        theirs.send(torch.zeros(100_000))


@pytest.mark.parametrize("lengths", [(MAX_HEADER + 1, 0), (2, MAX_BODY + 1), (2**32 - 1,) * 2])
def test_a_frame_that_says_it_is_huge_is_refused_before_it_is_read(pair, lengths):
    ours, theirs = pair
    ours.connection.sendall(struct.pack("!II", *lengths))

    with pytest.raises(NotPlain, match="too large"):
        theirs.receive()


def test_a_value_that_is_too_large_is_not_sent(pair):
    ours, theirs = pair

    with pytest.raises(NotPlain, match="texts and lists at once: the limit is 1,048,576"):
        ours.send("x" * (MAX_HEADER + 1))

    ours.send("small")
    assert theirs.receive() == "small"
