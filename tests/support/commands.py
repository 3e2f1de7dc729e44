"""Run commands and scripts, also with a planted fault, without a launcher's variables."""

import contextlib
import os
import random
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import warm

ROOT = Path(__file__).parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
SCRIPT = ROOT / "scripts" / "PT_CNN_MultiGPU.py"
INSTRUMENTED = SUPPORT / "instrumented.py"
# The variables that a launcher or a test may have left.
PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "HOROVOD_", "TORCHELASTIC_", "MASTER_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MULTIGPU_LAUNCHER")
NAMES += ("PYTEST_CURRENT_TEST", "PLANT", "WARM_IMPORTED")


def clean_environment(**more: object) -> dict[str, str]:
    """This process's environment without a launcher's variables, and with `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIXES) and name not in NAMES
    }
    return kept | {name: str(value) for name, value in more.items()}


def run(
    *command: object, cwd: Path | None = None, timeout: float = 240, **environment: object
) -> subprocess.CompletedProcess:
    """Run a command to its end, at most `timeout` s; .stdout has stdout and stderr.

    Its forks of the warm process print where they are when three quarters of that are over.
    """
    environment[warm.WHERE_AFTER] = 0.75 * timeout
    try:
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            timeout=timeout,
            env=clean_environment(**environment),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")
        raise AssertionError(f"still running after {timeout:g} s:\n{printed}") from None


def run_script(
    path: Path,
    *flags: object,
    cwd: Path | None = None,
    timeout: float = 240,
    **environment: object,
) -> subprocess.CompletedProcess:
    """As `run("python", path, *flags)`, in a fork of a process that has imported torch."""
    return run(warm.python(), path, *flags, cwd=cwd, timeout=timeout, **environment)


def torchrun(
    ranks: int,
    path: Path,
    *flags: object,
    cwd: Path | None = None,
    timeout: float = 240,
    **environment: object,
) -> subprocess.CompletedProcess:
    """Run a script under torchrun, the agent and the ranks as `run_script` does."""
    # Without --local-addr, --standalone hangs if the machine's name does not resolve.
    local = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
    return run(warm.torchrun(), *local, path, *flags, cwd=cwd, timeout=timeout, **environment)


def _ports() -> Iterator[int]:
    """Each worker's own ports below 32768, in an order by chance, again and again.

    The kernel gives none of them to a listener that asks for any port. A port stays free until
    the program listens, a second or two later. Without ports of its own, another worker can
    choose the same one, and the ranks of two tests wait for each other.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 7
    own = range(25000 + 1000 * worker, 26000 + 1000 * worker)
    return cycle(random.SystemRandom().sample(own, len(own)))


PORTS = _ports()
TAKING = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no other test of this run gets meanwhile."""
    ports = []
    with TAKING:
        for port in islice(PORTS, 1000):
            with contextlib.suppress(OSError), socket.create_server(("", port)):
                ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError("no free ports")


def alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


# A fault for `planted`: gradients are not averaged over the ranks.
SILENT_DDP = """
class Silent(lesson.DDP):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.require_backward_grad_sync = False

lesson.DDP = Silent
"""


def planted(folder: Path, stem: str, fault: str) -> Path:
    """Write a script that runs `fault` and then the lesson, which `fault` can use as `lesson`.

    A spawned process imports the file again and so has the fault too.
    """
    script = (ROOT / "scripts" / f"{stem}.py").read_text()
    start = script.partition('if __name__ == "__main__":\n')[2].splitlines()[0]
    path = folder / "planted.py"
    path.write_text(
        f"import os, sys, torch\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        f"import {stem} as lesson\n"
        f"from multigpu import launch\n"
        f"{fault}\n"
        f"if __name__ == '__main__':\n" + re.sub(r"\b(main|parse)\b", r"lesson.\1", start)
    )
    return path
