"""How do the ranks meet? Rank 0 opens a key-value store, the others connect, and each rank is claimed once.

torch.distributed's own rendezvous waits half an hour for a rank that never comes, and as long if two processes
claim one rank. Here both end in one sentence.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch.distributed as dist

from multigpu.errors import UserError
from multigpu.launch import World, port_candidates

PATIENCE = 180.0  # seconds to wait for all ranks: importing torch from a busy file system can take two minutes


def meet(world: World, patience: float = PATIENCE) -> dist.Store:
    """A store that all ranks of the run share, for `dist.init_process_group(store=…)`.

    Raises UserError if rank 0 cannot bind the port that was given, if two processes claim one rank,
    or if not all ranks have come after `patience` seconds.
    """
    if world.size == 1:
        return dist.HashStore()
    deadline = time.monotonic() + patience
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun (or `spawn`) has opened the store already
        store = _connect(world, world.port, deadline)
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    else:
        ports = [world.port] if world.port else port_candidates(world.job)
        store = _open(world, ports) if world.rank == 0 else _search(world, ports, deadline)
    _claim(store, world, deadline, patience)
    return store


def _open(world: World, ports: list[int]) -> dist.Store:
    """Rank 0 opens the store on the first port that is free, and signs it."""
    for port in ports:
        try:
            store = dist.TCPStore(world.address, port, world.size, is_master=True, wait_for_workers=False)
            store.set("job", world.job if world.port is None else "")
            return store
        except (RuntimeError, OSError) as error:  # DistNetworkError is a RuntimeError
            if "EADDRINUSE" not in str(error) and "in use" not in str(error):
                raise UserError(f"rank 0 on {socket.gethostname()} cannot open port {port}: {error}") from None
            if world.port is None and (other := _knock(world, port)) is not None:
                other.set("clash", "0")
                raise _clash(0) from None
    if world.port is not None:
        raise UserError(
            f"rank 0 on {socket.gethostname()} cannot bind port {world.port}, which is in use: another run, or a second "
            f"process that claims rank 0, holds it. Give another MASTER_PORT, or none to let the run choose."
        )
    raise UserError(f"rank 0 found none of the ports {ports[0]} … {ports[-1]} free: export MASTER_PORT=<free port>.")


def _search(world: World, ports: list[int], deadline: float) -> dist.Store:
    """The other ranks look for rank 0's store, until it is there."""
    if world.port is not None:
        return _connect(world, world.port, deadline)
    while time.monotonic() < deadline:
        for port in ports:
            if (store := _knock(world, port)) is not None:
                return store
        time.sleep(0.2)
    raise _absent(world, f"on any of the ports {ports[0]} … {ports[-1]}")


def _knock(world: World, port: int) -> dist.Store | None:
    """This run's store if it is the one that answers at the port. Somebody else's server may answer, or none."""
    if not _answers(world.address, port):
        return None
    try:
        store = dist.TCPStore(world.address, port, world.size, is_master=False, timeout=timedelta(seconds=5))
        until = time.monotonic() + 2
        while not store.check(["job"]):
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return store if store.get("job").decode() == world.job else None
    except RuntimeError:
        return None


def _connect(world: World, port: int | None, deadline: float) -> dist.Store:
    while port is not None and time.monotonic() < deadline:
        if _answers(world.address, port):
            left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            try:
                return dist.TCPStore(world.address, port, world.size, is_master=False, timeout=left)
            except RuntimeError:
                continue
        time.sleep(0.1)
    raise _absent(world, f"at port {port}")


def _answers(address: str, port: int) -> bool:
    try:
        with closing(socket.create_connection((address, port), timeout=2)):
            return True
    except OSError:
        return False


def _claim(store: dist.Store, world: World, deadline: float, patience: float) -> None:
    """Each process claims its rank; nobody goes on before all ranks are claimed, each by one process."""
    if store.add(f"rank {world.rank}", 1) > 1:
        store.set("clash", str(world.rank))
        raise _clash(world.rank)
    everybody, pause = [f"rank {rank}" for rank in range(world.size)], 0.005
    while not store.check(everybody):
        if store.check(["clash"]):
            raise _clash(int(store.get("clash")))
        if time.monotonic() > deadline:
            absent = [rank for rank in range(world.size) if not store.check([f"rank {rank}"])]
            raise UserError(
                f"after {patience:.0f} s rank {absent[0]} has not come ({len(absent)} of {world.size} are missing): "
                f"look for its error message further up, or for a node that cannot reach {world.address}."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    if store.check(["clash"]):
        raise _clash(int(store.get("clash")))


def _clash(rank: int) -> UserError:
    return UserError(
        f"two processes claim rank {rank}: each must have a RANK of its own. Let torchrun or srun set it, "
        f"and check that no earlier run with this address and port is still alive."
    )


def _absent(world: World, where: str) -> UserError:
    return UserError(
        f"rank {world.rank} on {socket.gethostname()} found no rank 0 at {world.address} {where}: "
        f"check that rank 0 was started, and that MASTER_ADDR and MASTER_PORT are the same on all ranks."
    )


@contextmanager
def together(world: World) -> Iterator[None]:
    """All ranks leave this block, or none: a user's mistake on one rank ends every rank, and is told once.

    Without it the rank that fails leaves, and the others wait for it in their next collective.
    It is a barrier, too. No collectives inside: a rank that fails would be missing in them.
    """
    mine: str | None = None
    try:
        yield
    except UserError as error:
        mine = str(error)
    told: list[str | None] = [None] * world.size
    dist.all_gather_object(told, mine)
    for rank, text in enumerate(told):
        if text is not None:
            raise UserError(f"{text} (seen on rank {rank})" if rank else text, quiet=world.rank != 0)
