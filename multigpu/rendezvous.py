"""How do the ranks meet? Rank 0 opens a key-value store, the others connect, and each rank is claimed once.

torch.distributed's own rendezvous waits half an hour for a rank that never comes, and as long if two processes
claim one rank. Here both end in one sentence.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.launch.world import World, port_candidates

PATIENCE = 180.0  # seconds to wait for all ranks: importing torch from a busy file system can take two minutes


def meet(world: World, device: torch.device, patience: float = PATIENCE) -> dist.Store:
    """A store that all ranks of the run share, for `dist.init_process_group(store=…)`.

    A given MASTER_PORT is only where the ranks find each other. The store, like the connections that gloo and NCCL
    open later, takes any free port: nodes between which one port alone is open cannot train together anyway.

    Raises UserError if rank 0 cannot bind the port that was given, if two processes claim one rank,
    if not all ranks have come after `patience` seconds, or if one has a GPU and another has none.
    """
    if world.size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + patience
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun, or `spawn`, has opened it. torchrun keeps it when it starts the ranks again: what they say now is new.
        store = next(dist.rendezvous("env://", world.rank, world.size))[0]
        store = dist.PrefixStore(
            f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
        )
    else:
        store = _own_store(world, deadline)
    _gather(store, world, device, deadline, patience)
    return store


def _own_store(world: World, deadline: float) -> dist.Store:
    try:
        socket.getaddrinfo(world.address, None)
    except OSError:
        raise UserError(
            f"the name {world.address} of rank 0's machine does not resolve on {socket.gethostname()}: "
            f"export MASTER_ADDR=<an address that all nodes can reach>."
        ) from None
    ports = [world.port] if world.port else port_candidates(world.job)
    return _open(world, ports) if world.rank == 0 else _search(world, ports, deadline)


def _open(world: World, ports: list[int]) -> dist.Store:
    """Rank 0 opens the store on any free port, and tells which one to whoever knocks at the first port that is free."""
    for port in ports:
        try:
            door = _listen(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"rank 0 on {socket.gethostname()} cannot bind port {port}: {error.strerror}."
                ) from None
            if (other := _knock(world, port)) is not None:
                other.set("clash", "0")
                raise _clash(0) from None
            continue
        # It listens on all addresses; rank 0 itself needs none that the network knows.
        store = dist.TCPStore(
            "127.0.0.1", 0, world.size, is_master=True, wait_for_workers=False
        )
        answer = f"{_name(world)} {store.port}\n".encode()
        threading.Thread(target=_answer, args=(door, answer), daemon=True).start()
        return store
    if world.port is not None:
        raise UserError(
            f"rank 0 on {socket.gethostname()} cannot bind port {world.port}, which is in use: "
            f"give another MASTER_PORT, or none to let the run choose."
        )
    raise UserError(
        f"rank 0 found none of the ports {ports[0]} … {ports[-1]} free: export MASTER_PORT=<free port>."
    )


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _answer(door: socket.socket, answer: bytes) -> None:
    """Until the process ends: a process that claims rank 0 later is told, too."""
    while True:
        try:
            visitor, _ = door.accept()
            with visitor:
                visitor.sendall(answer)
        except OSError:
            continue


def _search(world: World, ports: list[int], deadline: float) -> dist.Store:
    """The other ranks knock until rank 0 answers."""
    while time.monotonic() < deadline:
        for port in ports:
            if (store := _knock(world, port)) is not None:
                return store
            if (
                time.monotonic() > deadline
            ):  # a machine that does not answer takes two seconds a port
                break
        time.sleep(0.1)
    raise UserError(
        f"rank {world.rank} on {socket.gethostname()} found no rank 0 at {world.address}, port {ports[0]}: "
        f"check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are the same on all ranks."
    )


def _knock(world: World, port: int) -> dist.Store | None:
    """This run's store, if its rank 0 answers at the port. Nobody, or a server of somebody else's: None."""
    try:
        with socket.create_connection((world.address, port), timeout=2) as door:
            name, _, store_port = (
                door.makefile("rb").readline(1000).decode().strip().rpartition(" ")
            )
    except (OSError, UnicodeDecodeError):
        return None
    return (
        _join(world, int(store_port))
        if name == _name(world) and store_port.isdecimal()
        else None
    )


def _name(world: World) -> str:
    return f"multigpu {world.job if world.port is None else ''} {world.size}"


def _join(world: World, port: int) -> dist.Store:
    try:
        return dist.TCPStore(
            world.address,
            port,
            world.size,
            is_master=False,
            timeout=timedelta(seconds=PATIENCE),
        )
    except RuntimeError:
        raise UserError(
            f"rank {world.rank} on {socket.gethostname()} cannot reach rank 0's store at {world.address}, port {port}: "
            f"look for rank 0's error message, or for a firewall between the nodes."
        ) from None


def _gather(
    store: dist.Store, world: World, device: torch.device, deadline: float, patience: float
) -> None:
    """Each process claims its rank; nobody goes on before all ranks are claimed, each by one process.

    All on GPUs, or all on CPUs: NCCL and gloo would wait for each other for ever.
    """
    pause, longest = (
        0.005,
        min(0.25, 0.005 * world.size),
    )  # the more ranks ask, the more seldom each does
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
                absent = [
                    rank for rank in range(world.size) if not store.check([f"rank {rank}"])
                ]
                raise UserError(
                    f"after {patience:.0f} s rank {absent[0]} has not come ({len(absent)} of {world.size} are missing): "
                    f"look for its error message further up, or for a node that cannot reach {world.address}."
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        clash = int(store.get("clash")) if store.check(["clash"]) else None
        alike = clash is not None or store.add(f"ranks on {device.type}", 0) == world.size
        other = "" if alike else store.get("on a cpu").decode()
    except RuntimeError:
        raise UserError(
            f"rank 0 at {world.address} ended while rank {world.rank} waited for all to come: look for its error message."
        ) from None
    if clash is not None:
        if world.rank == 0:
            time.sleep(1)  # the others read the reason in this process's store
        raise _clash(clash)
    if other:
        if world.rank == 0:
            time.sleep(1)
        raise UserError(
            f"{other} has no GPU to compute on, but other ranks do: look at nvidia-smi and at torch's build there, "
            f"or hide all GPUs with CUDA_VISIBLE_DEVICES=.",
            already_reported=world.rank != 0,
        )


def _clash(rank: int) -> UserError:
    return UserError(
        f"two processes claim rank {rank}: each must have a RANK of its own. Let torchrun or srun set it, "
        f"and check that no earlier run with this address and port is still alive."
    )


def same_everywhere(
    world: World, what: str, value: object, gather: Callable[[Any], list] | None = None
) -> None:
    """Raises UserError, on all ranks, if `value` is not the same on all: `what`, as "the training data", says what differs.

    Else the ranks would learn from different things, or wait for each other, and none of them could tell. `gather` as in
    `together`.
    """
    told: list[object] = [None] * world.size
    if gather is None:
        dist.all_gather_object(told, value)
    else:
        told = gather(value)
    others = [rank for rank in range(world.size) if told[rank] != told[0]]
    if others:
        raise UserError(
            f"{what} of rank {others[0]} is not that of rank 0: give all nodes the same.",
            already_reported=world.rank != 0,
        )


@contextmanager
def fail_together(world: World, gather: Callable[[Any], list] | None = None) -> Iterator[None]:
    """All ranks leave this block, or none: a user's mistake (UserError) on one rank ends every rank, and is told once.

    Without it the rank that fails leaves, and the others wait for it in their next collective.
    It is a barrier, too. No collectives inside: a rank that fails would be missing in them. `gather` collects an object of
    each rank, by rank, where it is not to be done in the default group.
    """
    mine: str | None = None
    try:
        yield
    except UserError as error:
        mine = str(error)
    told: list[str | None] = [None] * world.size
    if gather is None:
        dist.all_gather_object(told, mine)
    else:
        told = gather(mine)
    for rank, text in enumerate(told):
        if text is not None:
            raise UserError(
                f"{text} (seen on rank {rank})" if rank else text,
                already_reported=world.rank != 0,
            ) from None
