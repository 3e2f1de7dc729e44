"""A slow network on this machine: two network namespaces with a link of a given rate.

It needs Linux, root and iproute2 (`ip` and `tc`). The ranks are real processes; their traffic
goes through the kernel's token bucket filter, in both directions. A namespace has no other
network.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from multigpu.errors import UserError
from multigpu.launch.processes import Processes

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29512
# The namespace differs by rank, but all ranks have the same command.
IN_NAMESPACE = ["sh", "-c", 'exec ip netns exec "$MULTIGPU_NAMESPACE" "$@"', "sh"]


def unavailable_reason() -> str | None:
    """Why this machine cannot make a slow link; None if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no command {tool}: apt-get install iproute2"
    try:
        with linked_namespaces(1000):
            return None
    except UserError as error:
        return str(error)


@contextmanager
def linked_namespaces(megabits: float) -> Iterator[list[str]]:
    """Make two namespaces with a link of `megabits` Mbit/s and yield their names.

    Both are removed afterwards. Raises UserError if they cannot be made.
    """
    names = [f"multigpu-{os.getpid()}-{end}" for end in "ab"]
    interfaces = _interfaces()
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", interfaces[0], "type", "veth", "peer", "name", interfaces[1])
        for name, interface, address in zip(names, interfaces, ADDRESSES, strict=True):
            _ip("link", "set", interface, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _ip("-n", name, "link", "set", interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # The burst is 5 ms at this rate, and at least one packet of the loopback's size.
            burst = max(64 * 1024, int(megabits * 1e6 / 8 * 0.005))
            rate = ("rate", f"{megabits}mbit", "burst", str(burst), "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *rate)
        yield names
    finally:
        for name in names:
            with suppress(UserError):
                _ip("netns", "delete", name)


def run(command: list[str], megabits: float, seconds: float = 600, **environment: str) -> int:
    """Run `command` as two ranks, one at each end of a link of `megabits` Mbit/s.

    The ranks have torchrun's variables and `environment`. Returns the exit code of the first
    rank that fails, 0 if none does. Raises UserError if the link cannot be made, or if the
    ranks have not ended after `seconds`.
    """
    with linked_namespaces(megabits) as names:
        environments = {}
        for rank, (name, interface) in enumerate(zip(names, _interfaces(), strict=True)):
            environments[rank] = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(PORT),
                "MULTIGPU_NAMESPACE": name,
                "GLOO_SOCKET_IFNAME": interface,
                **environment,
            }
        ranks = Processes([*IN_NAMESPACE, *command], environments)
        deadline = time.monotonic() + seconds
        try:
            while ranks.running() and not ranks.failed() and time.monotonic() < deadline:
                time.sleep(0.1)
            failed = ranks.failed()
            late = ranks.running() and not failed
        finally:
            ranks.end()
        if late:
            raise UserError(
                f"the run over {megabits:g} Mbit/s has not ended after {seconds:.0f} s: "
                f"give it fewer steps."
            )
        return failed[1] if failed else 0


def _interfaces() -> list[str]:
    """The names of the link's two ends; an interface's name has at most 15 characters."""
    return [f"mg{os.getpid() % 100000}{end}" for end in "ab"]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"`{' '.join(words)}` failed ({done.stderr.strip()}): "
            f"this machine cannot make a slow link."
        )
