"""What if the network is slow? Two network namespaces of this machine, joined by a cable that carries so many Mbit/s.

It needs Linux, root and iproute2 (`ip` and `tc`). The ranks are real processes; what they send goes through the kernel's
token bucket filter, in both directions. A namespace has no other network.
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
# The namespace differs by rank, and the command is one for all.
INSIDE = ["sh", "-c", 'exec ip netns exec "$MULTIGPU_NAMESPACE" "$@"', "sh"]


def obstacle() -> str | None:
    """Why there can be no slow link here; None if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces want root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no command {tool}: apt-get install iproute2"
    try:
        with cable(1000):
            return None
    except UserError as error:
        return str(error)


@contextmanager
def cable(megabits: float) -> Iterator[list[str]]:
    """The names of two namespaces with a cable of `megabits` Mbit/s between them; both are gone afterwards.

    Raises UserError where they cannot be made.
    """
    names = [f"multigpu-{os.getpid()}-{end}" for end in "ab"]
    ends = [f"mg{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # a burst as large as 5 ms of the rate, at least one packet of the loopback's size
            burst = max(64 * 1024, int(megabits * 1e6 / 8 * 0.005))
            rate = ("rate", f"{megabits}mbit", "burst", str(burst), "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *rate)
        yield names
    finally:
        for name in names:
            with suppress(UserError):
                _ip("netns", "delete", name)


def run(command: list[str], megabits: float, seconds: float = 600, **environment: str) -> int:
    """Run `command` as two ranks, one at each end of the cable; the exit code of the first that fails, 0 if none does.

    They find their place as under torchrun. Raises UserError where there can be no such link.
    """
    with cable(megabits) as names:
        interface = f"mg{os.getpid() % 100000}"
        environments = {
            rank: os.environ
            | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "MULTIGPU_NAMESPACE": name,
                "GLOO_SOCKET_IFNAME": interface + "ab"[rank], **environment,
            }
            for rank, name in enumerate(names)
        }  # fmt: skip
        ranks = Processes([*INSIDE, *command], environments)
        try:
            deadline = time.monotonic() + seconds
            while ranks.running() and not ranks.failed() and time.monotonic() < deadline:
                time.sleep(0.1)
            late, failed = ranks.running() and not ranks.failed(), ranks.failed()
        finally:
            ranks.end()
        if late:
            raise UserError(
                f"the run over {megabits:g} Mbit/s has not ended after {seconds:.0f} s: give it fewer steps."
            )
        return failed[1] if failed else 0


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"`{' '.join(words)}` failed ({done.stderr.strip()}): a slow link cannot be made here."
        )
