"""Run a command, a script under torchrun, or a script with a planted fault, in an environment without a launcher's variables."""

import contextlib
import os
import random
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
SCRIPT = ROOT / "scripts" / "PT_CNN_MultiGPU.py"
INSTRUMENTED = SUPPORT / "instrumented.py"
LAUNCHERS = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "HOROVOD_",
    "TORCHELASTIC_",
    "MASTER_",
)
TRACES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "PYTEST_CURRENT_TEST",
    "PLANT",
    "MULTIGPU_LAUNCHER",
)


def clean_environment(**more: object) -> dict[str, str]:
    """This environment without anything that a launcher left in it, and with `more`."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in TRACES
    }
    return kept | {key: str(value) for key, value in more.items()}


def run(
    *command: object, cwd: Path | None = None, timeout: float = 240, **environment: object
) -> subprocess.CompletedProcess:
    """Run a command to its end; stdout and stderr come together in .stdout. A hang is a failure after `timeout` s."""
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, timeout=timeout, env=clean_environment(**environment), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def torchrun(
    ranks: int, script: Path, *flags: object, **keywords: object
) -> subprocess.CompletedProcess:
    # --local-addr: where the machine's own name does not resolve, --standalone waits for ever
    local = ("--standalone", "--local-addr=127.0.0.1")
    return run("torchrun", *local, f"--nproc-per-node={ranks}", script, *flags, **keywords)


def free_ports(count: int) -> list[int]:
    """Below 32768: the kernel gives no such port to the listeners that ask for any, which are opened before these are bound."""
    found = []
    for port in random.SystemRandom().sample(range(25000, 32000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


# A fault for `planted`: the gradients are never averaged.
SILENT_DDP = """
class Silent(lesson.DDP):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.require_backward_grad_sync = False

lesson.DDP = Silent
"""


def planted(folder: Path, stem: str, fault: str) -> Path:
    """A script that is the lesson's after `fault` was run, which knows it as `lesson`.

    A spawned process imports the file again, and so has the fault, too.
    """
    path = folder / "planted.py"
    path.write_text(
        f"import os, sys, torch\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\nimport {stem} as lesson\n"
        f"from multigpu import launch\n{fault}\n"
        "if __name__ == '__main__':\n    launch.start(lesson.main, lesson.parse())\n"
    )
    return path
