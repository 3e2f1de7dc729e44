"""Which worker am I, and where are the others? Read TF_CONFIG and check it, or find out what belongs into it.

TensorFlow takes each process's place from TF_CONFIG: the addresses of all workers, and the number of this one. It believes
what stands there, and then waits an hour for a worker that never comes. Nothing here imports TensorFlow.
"""

import errno
import hashlib
import ipaddress
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from multigpu import rendezvous
from multigpu.devices import CLASSROOM
from multigpu.errors import UserError, pluralize
from multigpu.launch import world
from multigpu.launch.world import World
from multigpu.rendezvous import PATIENCE

NO_PROXY = "no_grpc_proxy"  # gRPC reads it in small letters only
EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]}, "task": {"type": "worker", "index": 0}}'


def find(environ: Mapping[str, str] = os.environ) -> World:
    """This process's place: TF_CONFIG's where there is one, else what torchrun, srun or mpirun left in the environment.

    The rank is the worker's number; a chief, if there is one, is rank 0. How many GPUs a worker has is asked in `share`.
    Raises UserError if TF_CONFIG is not what TensorFlow expects, or contradicts the launcher.
    """
    launched = {name: value for name, value in environ.items() if name != "SLURM_GPUS_ON_NODE"}
    if not environ.get("TF_CONFIG"):
        return world.find(launched)
    addresses, rank = read(environ["TF_CONFIG"])
    try:
        started = world.find(launched)
    except UserError:
        started = World()  # the shell of a Slurm job, say: whoever writes TF_CONFIG there starts the workers, too
    if started.size > 1 and (started.rank, started.size) != (rank, len(addresses)):
        raise UserError(
            f"TF_CONFIG says worker {rank} of {len(addresses)}, {started.launcher} says rank {started.rank} of {started.size}: "
            f"unset TF_CONFIG, or start the workers without {started.launcher}.",
            already_reported=started.rank != 0,
        )
    if environ.get("MASTER_PORT", "0") in {
        address.rpartition(":")[2] for address in addresses
    }:
        raise UserError(
            f"MASTER_PORT is {environ['MASTER_PORT']}, which TF_CONFIG gives to a worker: the workers meet at another port "
            f"than TensorFlow's, so give another MASTER_PORT, or none."
        )
    hosts = [_host(address) for address in addresses]
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return World(
        rank, len(addresses), here.index(rank), len(here), "TF_CONFIG", address=hosts[0].strip("[]"),
        port=world.integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        # Worker 0's address tells one run from another: no two runs can have it.
        job=f"tf-{hashlib.sha256(addresses[0].encode()).hexdigest()[:16]}", nodes=len(set(hosts)),
    )  # fmt: skip


def read(text: str) -> tuple[list[str], int]:
    """The workers' addresses by rank, and this worker's rank. Raises UserError for what TensorFlow would not understand."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _wrong(f"is not JSON ({error})") from None
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not (cluster.get("worker") or cluster.get("chief")):
        raise _wrong("has no list cluster → worker")
    if others := sorted(set(cluster) - {"worker", "chief"}):
        raise UserError(
            f"TF_CONFIG's cluster has {others[0]!r}: this strategy knows workers and one chief; parameter servers and "
            f"evaluators are other strategies' affair, so leave them out."
        )
    lists = [cluster.get("chief", []), cluster.get("worker", [])]
    for kind, addresses in zip(("chief", "worker"), lists, strict=True):
        if not isinstance(addresses, list) or not all(
            isinstance(address, str) for address in addresses
        ):
            raise _wrong(f"has something else than a list of texts in cluster → {kind}")
        for address in addresses:
            _check_address(address)
    addresses = lists[0] + lists[1]
    if len(lists[0]) > 1:
        raise UserError(f"TF_CONFIG has {len(lists[0])} chiefs: there is one at most.")
    if twice := [address for address in addresses if addresses.count(address) > 1]:
        raise UserError(
            f"TF_CONFIG gives {twice[0]} to two workers: each has a host and a port of its own."
        )
    task = config.get("task")
    if not isinstance(task, dict) or type(task.get("index")) is not int:
        raise _wrong("does not say which worker this is: no whole number in task → index")
    kind, index = task.get("type", "worker"), task["index"]
    if kind not in ("worker", "chief"):
        raise UserError(
            f"TF_CONFIG's task has the type {kind!r}, expected 'worker' or 'chief': nobody else trains here."
        )
    own = lists[kind == "worker"]
    if not 0 <= index < len(own):
        raise UserError(
            f"TF_CONFIG's task is {kind} {index}, but its cluster lists {pluralize(len(own), kind)}, from 0 on."
        )
    return addresses, index + (len(lists[0]) if kind == "worker" else 0)


def _wrong(what: str) -> UserError:
    return UserError(
        f"TF_CONFIG {what}: expected something like '{EXAMPLE}', or unset it and use --spawn, torchrun or srun."
    )


def _check_address(address: str) -> None:
    port = address.rpartition(":")[2]
    if (
        not _host(address)
        or not port.isdecimal()
        or not 0 < int(port) < 65536
        or "/" in address
    ):
        raise UserError(
            f"TF_CONFIG has the address {address!r}, expected host:port, as in 10.0.0.1:12345."
        )


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def meet(here: World, gpus: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Wait for all workers; their addresses as host:port, by rank: TF_CONFIG's, or a free port on each. All ranks call it.

    They meet as in lesson 05, at rank 0, in a gloo process group that stays for what the workers say to each other later.
    Raises UserError, on all ranks, if a port that TF_CONFIG gives is taken, if the workers were given different lists, if
    they have not the same number of `gpus`, and what rendezvous.meet raises.
    """
    try:
        store = rendezvous.meet(here, torch.device("cuda" if gpus else "cpu"), PATIENCE)
    except UserError as error:
        if here.launcher != "TF_CONFIG":
            raise
        hint = "Here TF_CONFIG says where rank 0 is (the first address of its list) and which rank this is (task → index)."
        raise UserError(f"{error} {hint}") from None
    patience = timedelta(
        seconds=PATIENCE
    )  # a worker that stands still is missed in what they say to each other, too
    try:
        dist.init_process_group(
            "gloo", store=store, rank=here.rank, world_size=here.size, timeout=patience
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"worker {here.rank} on {socket.gethostname()} cannot connect to the others ({reason}): "
            f"export GLOO_SOCKET_IFNAME=<the network interface that all nodes share>, and look at their messages."
        ) from None
    rendezvous.same_everywhere(here, "the number of GPUs", gpus)
    given = read(environ["TF_CONFIG"])[0] if environ.get("TF_CONFIG") else None
    rendezvous.same_everywhere(here, "TF_CONFIG's list of workers", given)
    with rendezvous.fail_together(here):
        own = given[here.rank] if given else f"{_reached_at(here)}:0"
        held = _hold(own)
    # Until all have chosen: else two workers on a machine could choose the same port. TensorFlow binds it moments later.
    with held:
        told = [""] * here.size
        dist.all_gather_object(told, f"{_host(own)}:{held.getsockname()[1]}")
    # gRPC would ask a cluster's web proxy for the way to the other workers, and wait.
    direct = {_host(address).strip("[]") for address in told} | set(
        filter(None, [os.environ.get(NO_PROXY)])
    )
    os.environ[NO_PROXY] = ",".join(sorted(direct))
    return told


@contextmanager
def patient() -> Iterator[None]:
    """In this block the workers may wait for each other as long as it takes: for the chief's proof, say."""
    dist.distributed_c10d._set_pg_timeout(timedelta(days=7), dist.group.WORLD)
    try:
        yield
    finally:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE), dist.group.WORLD)


def _hold(address: str) -> socket.socket:
    """A socket on the address's port; on a free one for port 0."""
    held, port = socket.socket(), int(address.rpartition(":")[2])
    if port:  # as TensorFlow does: connections of an earlier run, closed a moment ago, are no obstacle
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("", port))
        held.listen()
    except OSError as error:
        held.close()
        why = (
            "is in use on"
            if error.errno == errno.EADDRINUSE
            else f"cannot be bound ({error.strerror}) on"
        )
        raise UserError(
            f"TF_CONFIG gives this worker the address {address}, but the port {why} {socket.gethostname()}: "
            f"give another port to it, on all workers, or end what holds it."
        ) from None
    return held


def _reached_at(here: World) -> str:
    """The address under which the others reach this process: the one from which it reaches rank 0."""
    if here.local_size == here.size:
        return "127.0.0.1"
    name = here.address
    if here.rank > 0:
        try:
            family, _, _, _, target = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # a datagram socket: nothing is sent
                found = probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            raise UserError(
                f"worker {here.rank} on {socket.gethostname()} cannot reach {name} ({error.strerror}): "
                f"export MASTER_ADDR=<an address that all nodes can reach>."
            ) from None
        # On rank 0's own machine its name can mean the loopback interface: the others know it by that name.
        name = name if ipaddress.ip_address(found).is_loopback else found
    return f"[{name}]" if ":" in name else name


def share(here: World, seen: int, environ: Mapping[str, str] = os.environ) -> range:
    """Which of the `seen` GPUs of this node are this worker's: an even share. None where there are none to see."""
    promised = world.integer(environ, "SLURM_GPUS_ON_NODE", 0)
    if here.launcher == "srun" and here.local_size > 1 and seen * here.local_size == promised:
        return range(seen)  # srun --gpus-per-task: a task sees its own only
    if seen % here.local_size:
        raise UserError(
            f"this node's {pluralize(seen, 'GPU')} cannot be shared evenly by its {here.local_size} workers: start 1 worker "
            f"(it takes all GPUs) or {seen}, or hide all GPUs with CUDA_VISIBLE_DEVICES=.",
            already_reported=here.local_rank != 0,
        )
    each = seen // here.local_size
    return range(each * here.local_rank, each * (here.local_rank + 1))


@contextmanager
def company(here: World) -> Iterator[None]:
    """A worker that is gone ends the others, too: here with a sentence.

    They learn it from TensorFlow (at once if its machine tells that the connection is closed, else after ten seconds
    without a heartbeat), or from the process group.
    """
    try:
        yield
    except UserError as error:
        if here.launcher != "TF_CONFIG":
            raise
        raise UserError(str(error)) from None  # nobody but this worker writes to its terminal
    except Exception as error:
        tensorflows = type(error).__name__ in (
            "UnavailableError",
            "AbortedError",
            "CancelledError",
            "DeadlineExceededError",
        )
        if here.size == 1 or not (
            tensorflows or "gloo" in str(error) or isinstance(error, dist.DistError)
        ):
            raise
        if here.launcher != "TF_CONFIG":
            time.sleep(
                5
            )  # time for the launcher to end this process, and to tell what the other died of
        raise UserError(
            f"worker {here.rank} goes no further, because another worker is gone: look for that one's error message, then start "
            f"all workers again, with --resume to go on after the last epoch."
        ) from None


@contextmanager
def deadline() -> Iterator[None]:
    """What takes longer than PATIENCE in this block ends the process, by SIGALRM.

    TensorFlow connects its workers while it holds Python's lock: should one die just then, the others would wait an hour, and
    neither a thread nor Ctrl-C would be heard. This signal the operating system handles, so it has no sentence.
    """
    signal.alarm(int(PATIENCE))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # TensorFlow took it, and scancel's would be lost


def describe(
    here: World, replicas: int, gpus: bool, environ: Mapping[str, str] = os.environ
) -> str:
    """One line on who computes where, for the top of a log."""
    classroom = environ.get("SLURM_CLUSTER_NAME") == CLASSROOM
    why = (
        "the classroom cluster's GPUs are pretended" if classroom else "TensorFlow sees no GPU"
    )
    kind = "GPU" if gpus else f"CPU process ({why})"
    return f"device: {replicas} × {kind} ({pluralize(here.size, 'worker')} on {pluralize(here.nodes, 'node')}, started by {here.launcher})"
