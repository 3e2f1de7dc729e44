"""The ranks meet, on another port if theirs is taken; and what keeps them from meeting is said soon."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from multigpu.errors import UserError
from multigpu.launch.world import World, port_candidates
from multigpu.rendezvous import meet


@pytest.fixture(autouse=True)
def no_agent(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def meet_all(*worlds: World, patience: float = 20) -> list:
    """Each world in a thread of its own; what each got, or its UserError."""

    def one(world: World):
        try:
            return meet(world, torch.device("cpu"), patience)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(one, worlds))


def test_three_ranks_meet_without_a_port_given():
    stores = meet_all(*(World(rank, 3, rank, 3, job="4711.0") for rank in range(3)))
    stores[0].set("greeting", "hello")
    assert [store.get("greeting") for store in stores] == [b"hello"] * 3


def test_a_port_that_is_taken_is_passed_over():
    """By a server that says nothing, by one that says something else, and by another run."""
    first, second, third, fourth = port_candidates("4720.0", 4)
    other = meet_all(
        *(World(rank, 2, rank, 2, job=f"{second - 15000}.0") for rank in range(2))
    )
    with (
        socket.create_server(("127.0.0.1", first)),
        socket.create_server(("127.0.0.1", third)) as web,
    ):
        threading.Thread(
            target=lambda: web.accept()[0].sendall(b"HTTP/1.0 400 who are you?\n"), daemon=True
        ).start()
        stores = meet_all(*(World(rank, 2, rank, 2, job="4720.0") for rank in range(2)))
        with socket.create_connection(("127.0.0.1", fourth), timeout=5) as door:
            assert door.makefile().readline() == f"multigpu 4720.0 2 {stores[0].port}\n"
    other[0].set("who", "other")
    stores[0].set("who", "mine")
    assert stores[1].get("who") == b"mine" and other[1].get("who") == b"other"


def test_a_given_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        (error,) = meet_all(World(0, 2, 0, 2, port=port))
    assert f"cannot bind port {port}" in str(error) and "rank 0" in str(error)


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 1, 0)])
def test_two_claim_one_rank(ranks):
    results = meet_all(*(World(rank, 3, rank, 3, job=f"473{ranks[2]}.0") for rank in ranks))
    assert all(isinstance(result, UserError) for result in results)
    assert all(f"two processes claim rank {ranks[2]}" in str(result) for result in results), (
        results
    )


def test_a_rank_that_never_comes_is_named():
    results = meet_all(*(World(rank, 3, rank, 3, job="4740.0") for rank in (0, 2)), patience=2)
    assert "rank 1 has not come (1 of 3" in str(results[0])
    assert "rank 1 has not come" in str(results[1]) or "ended while rank 2 waited" in str(
        results[1]
    )


def test_rank_0_whose_address_leads_nowhere():
    """192.0.2.0/24 is for documentation: nobody answers there."""
    (error,) = meet_all(World(0, 2, 0, 1, address="192.0.2.1", job="4760.0"), patience=2)
    assert "rank 1 has not come" in str(error)


def test_no_rank_0():
    (error,) = meet_all(World(1, 2, 1, 2, port=1, job="x"), patience=1)
    assert "found no rank 0 at 127.0.0.1" in str(error)


@pytest.mark.parametrize("without", ["cpu", "vgpu"])
def test_a_rank_without_a_gpu_among_ranks_with_one(without):
    """NCCL and gloo would wait for each other."""
    with ThreadPoolExecutor(3) as pool:
        told = [
            pool.submit(
                meet,
                World(rank, 3, rank, 3, job=f"4750.{without}"),
                SimpleNamespace(type=kind),
                20,
            )
            for rank, kind in enumerate(("cuda", without, "cuda"))
        ]
    errors = [one.exception() for one in told]
    assert all(
        "rank 1 on" in str(error)
        and "has no GPU to compute on, but other ranks do" in str(error)
        for error in errors
    ), errors
    assert [error.already_reported for error in errors] == [False, True, True]
