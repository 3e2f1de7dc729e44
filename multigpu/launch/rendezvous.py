"""Ranks find each other: rank 0 opens a key-value store and the others connect to it.

Each rank is claimed by one process. torch.distributed's own rendezvous waits half an hour if a
rank never joins, or if two processes claim one rank. This module raises a UserError in both
cases.
"""

import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.launch.world import World, port_candidates

# Seconds to wait for all ranks: importing torch from a busy file system can take two minutes.
JOIN_TIMEOUT = 180.0
# torchrun keeps the address that rank 0's node had at the first start, even if rank 0 is on
# another node after a restart (torch 2.13, DynamicRendezvousHandler.next_rendezvous).
_STALE_ADDRESS = (
    "If a node has joined since the first start, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
    "before torchrun: without it, torchrun can give its ranks the address of an earlier start."
)


def open_store(
    world: World, device: torch.device, join_timeout: float = JOIN_TIMEOUT
) -> dist.Store:
    """A store that all ranks of the run share, for `dist.init_process_group(store=…)`.

    If MASTER_PORT is set, the ranks find each other at that port. The store itself uses any
    free port, as gloo's and NCCL's connections do later. So nodes that can reach each other on
    only one port cannot train together.

    Raises UserError if rank 0 cannot bind the given port, if two processes claim one rank, if
    not all ranks join within `join_timeout` seconds, or if one rank has a GPU and another has
    none.
    """
    if world.size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + join_timeout
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun or `spawn` opened the store.
        store = next(dist.rendezvous("env://", world.rank, world.size))[0]
        store = _of_this_start(store, world, deadline, join_timeout)
    else:
        store = _own_store(world, deadline)
    _claim_rank(store, world, device, deadline, join_timeout)
    return store


def _own_store(world: World, deadline: float) -> dist.Store:
    try:
        socket.getaddrinfo(world.address, None)
    except OSError:
        raise UserError(
            f"the name {world.address} of rank 0's machine does not resolve on "
            f"{socket.gethostname()}: export MASTER_ADDR=<an address that all nodes can "
            f"reach>."
        ) from None
    ports = [world.port] if world.port else port_candidates(world.job)
    if world.rank == 0:
        return _open_store(world, ports)
    return _find_store(world, ports, deadline)


def _open_store(world: World, ports: list[int]) -> dist.Store:
    """Rank 0 opens the store on any free port and listens on the first free one of `ports`.

    On that port it sends the store's port to every rank that connects.
    """
    for port in ports:
        try:
            listener = _listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"rank 0 on {socket.gethostname()} cannot bind port {port}: "
                    f"{error.strerror}."
                ) from None
            other = _store_at(world, port)
            if other is not None:
                other.set("clash", "0")
                raise _two_processes(0) from None
            continue
        # The store listens on all addresses; rank 0 itself uses the loopback address.
        store = dist.TCPStore(
            "127.0.0.1", 0, world.size, is_master=True, wait_for_workers=False
        )
        answer = f"{_run_name(world)} {store.port}\n".encode()
        threading.Thread(target=_answer, args=(listener, answer), daemon=True).start()
        return store
    if world.port is not None:
        raise UserError(
            f"rank 0 on {socket.gethostname()} cannot bind port {world.port}, which is in "
            f"use: set another MASTER_PORT, or unset it to let the run choose."
        )
    raise UserError(
        f"rank 0 found none of the ports {ports[0]} … {ports[-1]} free: "
        f"export MASTER_PORT=<free port>."
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _answer(listener: socket.socket, answer: bytes) -> None:
    """Send `answer` to each connection, until the process ends."""
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
        except OSError:
            continue


def _find_store(world: World, ports: list[int], deadline: float) -> dist.Store:
    """Try the ports in turn until rank 0 answers; the other ranks call this."""
    while time.monotonic() < deadline:
        for port in ports:
            store = _store_at(world, port)
            if store is not None:
                return store
            # A machine that does not answer takes two seconds per port.
            if time.monotonic() > deadline:
                break
        time.sleep(0.1)
    raise UserError(
        f"rank {world.rank} on {socket.gethostname()} found no rank 0 at {world.address}, "
        f"port {ports[0]}: check that rank 0 was started, and that MASTER_ADDR and "
        f"MASTER_PORT are the same on all ranks."
    )


def _store_at(world: World, port: int) -> dist.Store | None:
    """This run's store, if its rank 0 answers at the port; else None."""
    try:
        with socket.create_connection((world.address, port), timeout=2) as connection:
            line = connection.makefile("rb").readline(1000).decode()
    except (OSError, UnicodeDecodeError):
        return None
    name, _, store_port = line.strip().rpartition(" ")
    if name != _run_name(world) or not store_port.isdecimal():
        return None
    return _connect(world, int(store_port))


def _run_name(world: World) -> str:
    return f"multigpu {world.job if world.port is None else ''} {world.size}"


def _connect(world: World, port: int) -> dist.Store:
    try:
        return dist.TCPStore(
            world.address,
            port,
            world.size,
            is_master=False,
            timeout=timedelta(seconds=JOIN_TIMEOUT),
        )
    except RuntimeError:
        raise UserError(
            f"rank {world.rank} on {socket.gethostname()} cannot reach rank 0's store at "
            f"{world.address}, port {port}: look for rank 0's error message, or for a "
            f"firewall between the nodes."
        ) from None


def _of_this_start(
    store: dist.Store, world: World, deadline: float, join_timeout: float
) -> dist.Store:
    """The part of torchrun's store that belongs to this start of the ranks alone.

    When torchrun starts the ranks again, its store still has the keys of the earlier start.
    The restart count cannot tell the starts apart: it is each torchrun's own, and it stays the
    same when a node comes or goes. So rank 0 names the start. The other ranks cannot know
    whether a name that they read is an old one. So each rank writes a unique word, and rank 0
    writes the name together with all words that it has read. A name that comes with a rank's
    own word is new.

    Raises UserError if not all ranks answer within `join_timeout` seconds.
    """
    own_word = uuid.uuid4().hex
    words = [f"word of rank {rank}" for rank in range(1, world.size)]
    answers = [f"rank {rank} answers" for rank in range(1, world.size)]
    pause = 0.005
    try:
        start = dist.PrefixStore(f"start {own_word}", store)
        if world.rank > 0:
            store.set(words[world.rank - 1], own_word)
        while time.monotonic() < deadline:
            if world.rank > 0:
                name, *sent = store.get("start").split() if store.check(["start"]) else [b""]
                if own_word.encode() in sent:
                    start = dist.PrefixStore(f"start {name.decode()}", store)
                    start.set(answers[world.rank - 1], "")
                    return start
            else:
                if start.check(answers):
                    return start
                if store.check(words):
                    store.set("start", b" ".join([own_word.encode(), *store.multi_get(words)]))
            time.sleep(pause)
            pause = min(2 * pause, _longest_pause(world))
    except RuntimeError:
        raise _store_ended(world) from None
    hint = _STALE_ADDRESS if world.local_size < world.size else ""
    if world.rank > 0:
        raise UserError(
            f"rank 0 did not answer rank {world.rank} within {join_timeout:.0f} s: look for "
            f"its error message, or for a node that cannot reach {world.address}. "
            f"{hint}".strip()
        )
    missing = [
        rank for rank, answer in enumerate(answers, start=1) if not start.check([answer])
    ]
    raise _missing_ranks(missing, world, join_timeout, hint)


def _claim_rank(
    store: dist.Store, world: World, device: torch.device, deadline: float, join_timeout: float
) -> None:
    """Claim this process's rank in the store, and wait until every rank is claimed.

    Raises UserError if some ranks are on GPUs and others on CPUs: NCCL and gloo would wait for
    each other for ever.
    """
    pause = 0.005
    try:
        if store.add(f"rank {world.rank}", 1) > 1:
            store.set("clash", str(world.rank))
        else:
            store.add(f"ranks on {device.type}", 1)
            if device.type != "cuda":
                store.set("on a cpu", f"rank {world.rank} on {socket.gethostname()}")
            store.add("ranks", 1)
        while store.add("ranks", 0) < world.size and not store.check(["clash"]):
            if time.monotonic() > deadline:
                ranks = range(world.size)
                missing = [rank for rank in ranks if not store.check([f"rank {rank}"])]
                raise _missing_ranks(missing, world, join_timeout)
            time.sleep(pause)
            pause = min(2 * pause, _longest_pause(world))
        clash = int(store.get("clash")) if store.check(["clash"]) else None
        without_gpu = ""
        if clash is None and store.add(f"ranks on {device.type}", 0) != world.size:
            without_gpu = store.get("on a cpu").decode()
    except RuntimeError:
        raise _store_ended(world) from None
    if clash is None and not without_gpu:
        return
    if world.rank == 0:
        # Keep the store open while the other ranks read the reason in it.
        time.sleep(1)
    if clash is not None:
        raise _two_processes(clash)
    raise UserError(
        f"{without_gpu} has no GPU to compute on, but other ranks have one: look at "
        f"nvidia-smi and at torch's build there, or hide all GPUs with CUDA_VISIBLE_DEVICES=.",
        already_reported=world.rank != 0,
    )


def _longest_pause(world: World) -> float:
    """Seconds: the more ranks poll the store, the longer each waits between two polls."""
    return min(0.25, 0.005 * world.size)


def _missing_ranks(
    missing: list[int], world: World, join_timeout: float, hint: str = ""
) -> UserError:
    return UserError(
        f"rank {missing[0]} did not join within {join_timeout:.0f} s ({len(missing)} of "
        f"{world.size} ranks are missing): look for its error message further up, or for a "
        f"node that cannot reach {world.address}. {hint}".strip()
    )


def _store_ended(world: World) -> UserError:
    return UserError(
        f"rank 0 at {world.address} ended while rank {world.rank} waited for all ranks to "
        f"join: look for its error message."
    )


def _two_processes(rank: int) -> UserError:
    return UserError(
        f"two processes claim rank {rank}: each must have a different RANK. Let torchrun or "
        f"srun set RANK, and check that no earlier run with this address and port is still "
        f"alive."
    )


def same_everywhere(
    world: World, subject: str, value: object, gather: Callable[[Any], list] | None = None
) -> None:
    """Raise UserError on all ranks if `value` is not equal on all of them.

    `subject` names the value in the message, as in "the training data". Without this check the
    ranks would train on different data, or wait for each other, without an error. `gather`
    collects one object from each rank, in rank order; by default it uses the default process
    group.
    """
    values = _gather(world, value, gather)
    different = [rank for rank in range(world.size) if values[rank] != values[0]]
    if different:
        raise UserError(
            f"{subject} of rank {different[0]} differs from rank 0's: give all ranks the "
            f"same.",
            already_reported=world.rank != 0,
        )


@contextmanager
def fail_together(world: World, gather: Callable[[Any], list] | None = None) -> Iterator[None]:
    """If this block raises UserError on one rank, raise it on all ranks; rank 0 reports it.

    Otherwise the rank that fails would leave, while the others wait for it in their next
    collective. The end of the block is a barrier. Use no collectives inside the block, because
    a rank that fails would not take part. The parameter `gather` is that of `same_everywhere`.
    """
    own_error: str | None = None
    try:
        yield
    except UserError as error:
        own_error = str(error)
    for rank, text in enumerate(_gather(world, own_error, gather)):
        if text is not None:
            raise UserError(
                f"{text} (seen on rank {rank})" if rank else text,
                already_reported=world.rank != 0,
            ) from None


def _gather(world: World, value: object, gather: Callable[[Any], list] | None) -> list:
    """The `value` of each rank, by rank."""
    if gather is not None:
        return gather(value)
    values: list[object] = [None] * world.size
    dist.all_gather_object(values, value)
    return values
