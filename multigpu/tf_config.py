"""Read, check and write TF_CONFIG, or find out its content from the launcher's variables.

TensorFlow reads each process's place from TF_CONFIG: the addresses of all workers and the
number of this worker. TensorFlow does not check them, and it waits an hour for a worker that
never joins. (Tried with TensorFlow 2.21: worker 0 alone and worker 1 alone each ended after 60
minutes.) This module checks them first. It does not import TensorFlow.
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

from multigpu.devices import CLASSROOM
from multigpu.errors import UserError, pluralize
from multigpu.launch import rendezvous
from multigpu.launch import world as launched
from multigpu.launch.rendezvous import JOIN_TIMEOUT
from multigpu.launch.world import World

EXAMPLE = ["10.0.0.1:12345", "10.0.0.2:12345"]
NO_PROXY = "no_grpc_proxy"  # gRPC reads this variable in lower case only
LOST_WORKER = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")


def find_world(environ: Mapping[str, str] = os.environ) -> World:
    """This process's place: from TF_CONFIG if it is set, else from the launcher's variables.

    The rank is the worker's number; a chief, if there is one, is rank 0. `gpus_of_worker` says
    which GPUs a worker has. Raises UserError if TF_CONFIG is not what TensorFlow expects, or
    contradicts the launcher.
    """
    without_gpus = {
        name: value for name, value in environ.items() if name != "SLURM_GPUS_ON_NODE"
    }
    if not environ.get("TF_CONFIG"):
        return launched.find_world(without_gpus)
    addresses, rank = read(environ["TF_CONFIG"])
    try:
        started = launched.find_world(without_gpus)
    except UserError:
        # For example in the shell of a Slurm job: a user who sets TF_CONFIG there also starts
        # the workers.
        started = World()
    if started.size > 1 and (started.rank, started.size) != (rank, len(addresses)):
        raise UserError(
            f"TF_CONFIG says worker {rank} of {len(addresses)}, {started.launcher} says rank "
            f"{started.rank} of {started.size}: unset TF_CONFIG, or start the workers without "
            f"{started.launcher}.",
            already_reported=started.rank != 0,
        )
    ports = {address.rpartition(":")[2] for address in addresses}
    if environ.get("MASTER_PORT", "0") in ports:
        raise UserError(
            f"MASTER_PORT is {environ['MASTER_PORT']}, which TF_CONFIG gives to a worker: the "
            "rendezvous needs a different port, so set another MASTER_PORT, or unset it."
        )
    hosts = [_host(address) for address in addresses]
    on_this_node = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    # Worker 0's address identifies the run: two runs cannot use it at the same time.
    job = hashlib.sha256(addresses[0].encode()).hexdigest()[:16]
    port = launched.integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None
    return World(
        rank=rank,
        size=len(addresses),
        local_rank=on_this_node.index(rank),
        local_size=len(on_this_node),
        launcher="TF_CONFIG",
        address=hosts[0].strip("[]"),
        port=port,
        job=f"tf-{job}",
        nodes=len(set(hosts)),
    )


def read(text: str) -> tuple[list[str], int]:
    """The workers' addresses by rank, and this worker's rank.

    Raises UserError if TensorFlow would not understand `text`.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _tf_config_error(f"is not JSON ({error})") from None
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not (cluster.get("worker") or cluster.get("chief")):
        raise _tf_config_error("has no list cluster → worker")
    unsupported = sorted(set(cluster) - {"worker", "chief"})
    if unsupported:
        raise UserError(
            f"TF_CONFIG's cluster has {unsupported[0]!r}: this strategy supports workers and "
            "one chief. Parameter servers and evaluators belong to other strategies: leave "
            "them out."
        )
    lists = {"chief": cluster.get("chief", []), "worker": cluster.get("worker", [])}
    for kind, addresses in lists.items():
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise _tf_config_error(
                f"has something other than a list of texts in cluster → {kind}"
            )
        for address in addresses:
            _check_address(address)
    addresses = lists["chief"] + lists["worker"]
    if len(lists["chief"]) > 1:
        raise UserError(f"TF_CONFIG has {len(lists['chief'])} chiefs: give one, or none.")
    twice = [address for address in addresses if addresses.count(address) > 1]
    if twice:
        raise UserError(
            f"TF_CONFIG gives {twice[0]} to two workers: give each a different host:port."
        )
    task = config.get("task")
    if not isinstance(task, dict) or type(task.get("index")) is not int:
        raise _tf_config_error(
            "does not say which worker this is: no whole number in task → index"
        )
    kind = task.get("type", "worker")
    index = task["index"]
    if kind not in ("worker", "chief"):
        raise UserError(
            f"TF_CONFIG's task has the type {kind!r}, expected 'worker' or 'chief': this "
            "strategy supports no other."
        )
    if not 0 <= index < len(lists[kind]):
        raise UserError(
            f"TF_CONFIG's task is {kind} {index}, but its cluster lists "
            f"{pluralize(len(lists[kind]), kind)}, numbered from 0."
        )
    before = len(lists["chief"]) if kind == "worker" else 0
    return addresses, before + index


def write(addresses: list[str], rank: int) -> str:
    """TF_CONFIG's text for the worker with this rank; `read` reads it."""
    task = {"type": "worker", "index": rank}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


def _tf_config_error(problem: str) -> UserError:
    return UserError(
        f"TF_CONFIG {problem}: expected something like '{write(EXAMPLE, 0)}', or unset it and "
        "use torchrun or srun."
    )


def _check_address(address: str) -> None:
    port = address.rpartition(":")[2]
    valid_port = port.isdecimal() and 0 < int(port) < 65536
    if not _host(address) or not valid_port or "/" in address:
        raise UserError(
            f"TF_CONFIG has the address {address!r}, expected host:port, as in 10.0.0.1:12345."
        )


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def connect_workers(
    world: World, gpus: int, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Wait for all workers, and return their addresses as host:port, by rank.

    All ranks call it. The addresses are those in TF_CONFIG; without TF_CONFIG each worker gets
    a free port on its host. The workers find each other at rank 0, as in lesson 05, and form a
    gloo process group, which later carries messages between them. Raises UserError, on all
    ranks, if a port that TF_CONFIG gives is in use, or if the workers have different lists or
    different numbers of `gpus`. It also raises what rendezvous.open_store raises.
    """
    device = torch.device("cuda" if gpus else "cpu")
    try:
        store = rendezvous.open_store(world, device, JOIN_TIMEOUT)
    except UserError as error:
        if world.launcher != "TF_CONFIG":
            raise
        raise UserError(
            f"{error} TF_CONFIG gives rank 0's address (the first of cluster → worker) and "
            "this process's rank (task → index)."
        ) from None
    # This timeout also detects a worker that stops responding later.
    timeout = timedelta(seconds=JOIN_TIMEOUT)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"worker {world.rank} on {socket.gethostname()} cannot connect to the others "
            f"({reason}): export GLOO_SOCKET_IFNAME=<the network interface that all nodes "
            "share>, and read the other workers' messages."
        ) from None
    rendezvous.same_everywhere(world, "the number of GPUs", gpus)
    listed = read(environ["TF_CONFIG"])[0] if environ.get("TF_CONFIG") else None
    rendezvous.same_everywhere(world, "TF_CONFIG's list of workers", listed)
    with rendezvous.fail_together(world):
        own_address = listed[world.rank] if listed else f"{_reachable_name(world)}:0"
        reserved = _reserve(own_address)
    # Keep the port reserved until all workers have one: otherwise two workers on a machine
    # could choose the same port. TensorFlow binds it moments later.
    with reserved:
        addresses = [""] * world.size
        dist.all_gather_object(addresses, f"{_host(own_address)}:{reserved.getsockname()[1]}")
    # Otherwise gRPC would try to reach the workers through a cluster's web proxy, and wait.
    direct = {_host(address).strip("[]") for address in addresses}
    if os.environ.get(NO_PROXY):
        direct.add(os.environ[NO_PROXY])
    os.environ[NO_PROXY] = ",".join(sorted(direct))
    return addresses


@contextmanager
def without_timeout() -> Iterator[None]:
    """Let the workers wait up to 7 days in this block: the chief's proof can take long."""
    dist.distributed_c10d._set_pg_timeout(timedelta(days=7), dist.group.WORLD)
    try:
        yield
    finally:
        dist.distributed_c10d._set_pg_timeout(
            timedelta(seconds=JOIN_TIMEOUT), dist.group.WORLD
        )


def _reserve(address: str) -> socket.socket:
    """A socket that listens on the address's port; for port 0, on a free port."""
    port = int(address.rpartition(":")[2])
    listener = socket.socket()
    if port:
        # TensorFlow does this too: the port can have connections of a run that just ended.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
        listener.listen()
    except OSError as error:
        listener.close()
        why = f"cannot be bound ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            why = "is in use"
        raise UserError(
            f"TF_CONFIG gives this worker the address {address}, but the port {why} on "
            f"{socket.gethostname()}: give another port to it, on all workers, or end the "
            "process that holds it."
        ) from None
    return listener


def _reachable_name(world: World) -> str:
    """The name or address under which the other workers reach this process.

    On ranks other than 0 it is the address from which this process reaches rank 0.
    """
    if world.local_size == world.size:
        return "127.0.0.1"
    name = world.address
    if world.rank > 0:
        try:
            address = _own_address(name)
        except OSError as error:
            raise UserError(
                f"worker {world.rank} on {socket.gethostname()} cannot reach {name} "
                f"({error.strerror}): export MASTER_ADDR=<an address that all nodes can "
                "reach>."
            ) from None
        # On rank 0's machine this can be the loopback address, which other machines cannot
        # use: they use rank 0's name.
        if not ipaddress.ip_address(address).is_loopback:
            name = address
    return f"[{name}]" if ":" in name else name


def _own_address(target: str) -> str:
    """This machine's address on the route to `target`."""
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # for a datagram socket, connect sends nothing
        return probe.getsockname()[0].partition("%")[0]


def gpus_of_worker(
    world: World, visible: int, environ: Mapping[str, str] = os.environ
) -> range:
    """The numbers of this worker's GPUs; the node's workers share its `visible` GPUs evenly.

    Raises UserError if the node's workers cannot divide its GPUs evenly.
    """
    allocated_gpus = launched.integer(environ, "SLURM_GPUS_ON_NODE", 0)
    # srun --gpus-per-task hides the other workers' GPUs.
    per_task = visible * world.local_size == allocated_gpus
    if world.launcher == "srun" and world.local_size > 1 and per_task:
        return range(visible)
    if visible % world.local_size:
        raise UserError(
            f"this node's {pluralize(visible, 'GPU')} cannot be shared evenly by its "
            f"{world.local_size} workers: start 1 worker (it takes all GPUs) or {visible}, "
            "or hide all GPUs with CUDA_VISIBLE_DEVICES=.",
            already_reported=world.local_rank != 0,
        )
    per_worker = visible // world.local_size
    return range(per_worker * world.local_rank, per_worker * (world.local_rank + 1))


@contextmanager
def report_lost_worker(world: World) -> Iterator[None]:
    """Turn the error that a lost worker causes in this process into a UserError.

    TensorFlow raises it (at once if the other machine closes the connection, else after ten
    seconds without a heartbeat), or the process group does.
    """
    try:
        yield
    except UserError as error:
        if world.launcher != "TF_CONFIG":
            raise
        # Without a launcher each worker has its own terminal, so each prints the error.
        raise UserError(str(error)) from None
    except Exception as error:
        from_tensorflow = type(error).__name__ in LOST_WORKER
        from_the_group = "gloo" in str(error) or isinstance(error, dist.DistError)
        if world.size == 1 or not (from_tensorflow or from_the_group):
            raise
        if world.launcher != "TF_CONFIG":
            # Give the launcher time to end this process and to report the other's error.
            time.sleep(5)
        raise UserError(
            f"worker {world.rank} stops, because another worker is gone: look for that "
            "worker's error message, then start all workers again, with --resume to continue "
            "after the last epoch."
        ) from None


@contextmanager
def deadline() -> Iterator[None]:
    """End the process by SIGALRM if this block takes longer than JOIN_TIMEOUT.

    TensorFlow connects its workers while it holds Python's GIL. If a worker dies at that
    moment, the others would wait an hour, and neither a thread nor Ctrl-C could end them. The
    operating system handles this signal itself, so there is no error message.
    """
    signal.alarm(int(JOIN_TIMEOUT))
    try:
        yield
    finally:
        signal.alarm(0)
        # Remove TensorFlow's handler for SIGTERM: with it, scancel's SIGTERM has no effect.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def describe(
    world: World, replicas: int, gpus: bool, environ: Mapping[str, str] = os.environ
) -> str:
    """One line that names devices, workers and nodes, for the top of a log."""
    kind = "CPU process (TensorFlow sees no GPU)"
    if environ.get("SLURM_CLUSTER_NAME") == CLASSROOM:
        kind = "CPU process (the classroom cluster's GPUs are simulated)"
    if gpus:
        kind = "GPU"
    workers = pluralize(world.size, "worker")
    nodes = pluralize(world.nodes, "node")
    started = f"({workers} on {nodes}, started by {world.launcher})"
    return f"device: {replicas} × {kind} {started}"
