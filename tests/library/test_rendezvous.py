"""Ranks find each other, also if their port is taken; what prevents it is reported soon."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.launch.rendezvous import open_store
from multigpu.launch.world import World, port_candidates


@pytest.fixture(autouse=True)
def no_agent(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def meet_all(*worlds: World, join_timeout: float = 20) -> list:
    """Call `meet` for each world in a thread of its own; its store, or its UserError."""

    def one(world: World):
        try:
            return open_store(world, torch.device("cpu"), join_timeout)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(worlds)) as pool:
        return list(pool.map(one, worlds))


def test_three_ranks_meet_without_a_given_port():
    stores = meet_all(*(World(rank, 3, rank, 3, job="4711.0") for rank in range(3)))
    stores[0].set("greeting", "hello")
    assert [store.get("greeting") for store in stores] == [b"hello"] * 3


def test_ports_in_use_are_skipped():
    """In use by a server that sends nothing, one that sends other text, and another run."""
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
        with socket.create_connection(("127.0.0.1", fourth), timeout=5) as connection:
            assert connection.makefile().readline() == f"multigpu 4720.0 2 {stores[0].port}\n"
    other[0].set("who", "other")
    stores[0].set("who", "own")
    assert stores[1].get("who") == b"own" and other[1].get("who") == b"other"


def test_a_given_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        (error,) = meet_all(World(0, 2, 0, 2, port=port))
    assert f"cannot bind port {port}" in str(error) and "rank 0" in str(error)


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 1, 0)])
def test_two_processes_that_claim_one_rank_are_named(ranks):
    results = meet_all(*(World(rank, 3, rank, 3, job=f"473{ranks[2]}.0") for rank in ranks))
    assert all(isinstance(result, UserError) for result in results)
    assert all(f"two processes claim rank {ranks[2]}" in str(result) for result in results), (
        results
    )


def test_a_rank_that_never_joins_is_named():
    results = meet_all(
        *(World(rank, 3, rank, 3, job="4740.0") for rank in (0, 2)), join_timeout=2
    )
    assert "rank 1 did not join within 2 s (1 of 3" in str(results[0])
    assert any(
        fact in str(results[1])
        for fact in ("rank 1 did not join", "ended while rank 2 waited")
    )


def test_rank_0_with_an_unreachable_address():
    """192.0.2.0/24 is reserved for documentation: no machine answers there."""
    (error,) = meet_all(World(0, 2, 0, 1, address="192.0.2.1", job="4760.0"), join_timeout=2)
    assert "rank 1 did not join" in str(error)


def test_no_rank_0():
    (error,) = meet_all(World(1, 2, 1, 2, port=1, job="x"), join_timeout=1)
    assert "found no rank 0 at 127.0.0.1" in str(error)


@pytest.fixture
def agent_store(monkeypatch):
    """The store of a torchrun, which stays when it starts the ranks again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_each_start_has_its_own_part_of_torchruns_store(agent_store):
    """Also if the number of ranks changes. The restart count is no help: it is the same."""
    for start, size in enumerate((2, 3, 2)):
        stores = meet_all(*(World(rank, size, rank, size) for rank in range(size)))
        assert not any(isinstance(store, UserError) for store in stores), stores
        assert not stores[0].check(["greeting"])
        stores[0].set("greeting", str(start))
        assert [store.get("greeting") for store in stores] == [str(start).encode()] * size


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_in_which_a_rank_was_killed_does_not_disturb_the_next_one(agent_store, rank):
    (error,) = meet_all(World(rank, 2, rank, 2), join_timeout=0.3)
    assert f"rank {1 - rank} did not" in str(error)
    stores = meet_all(*(World(rank, 2, rank, 2) for rank in range(2)))
    stores[0].set("greeting", "hello")
    assert stores[1].get("greeting") == b"hello"


@pytest.mark.parametrize("without", ["cpu", "vgpu"])
def test_a_rank_without_a_gpu_among_ranks_with_one(without):
    """NCCL and gloo would wait for each other."""
    with ThreadPoolExecutor(3) as pool:
        results = [
            pool.submit(
                open_store,
                World(rank, 3, rank, 3, job=f"4750.{without}"),
                SimpleNamespace(type=kind),
                20,
            )
            for rank, kind in enumerate(("cuda", without, "cuda"))
        ]
    errors = [result.exception() for result in results]
    assert all(
        "rank 1 on" in str(error)
        and "has no GPU to compute on, but other ranks have one" in str(error)
        for error in errors
    ), errors
    assert [error.already_reported for error in errors] == [False, True, True]
