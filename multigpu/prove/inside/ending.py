"""Which rank a process is, and how the ranks end together after the last step."""

import atexit
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from multigpu.prove.record import DONE_PREFIX, ENDED_PREFIX, FAILED_PREFIX

# The variables in which launchers give a process its rank, and the number of ranks.
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
WORLDS = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
# Seconds that a rank waits for the last step of the others.
WAIT = 20.0


def rank() -> int:
    """This process's rank; 0 without ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _of(RANKS, 0)


def world() -> int:
    """The number of ranks; 1 without ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _of(WORLDS, 1)


def _of(names: tuple[str, ...], default: int) -> int:
    values = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(values[0]) if values else default


def _in_a_line(kind: type[BaseException], error: BaseException) -> str:
    """The error's type and first line; of NCCL's errors the last one, which says why."""
    lines = str(error).strip().splitlines() or [""]
    return f"{kind.__name__}: {lines[-1 if 'Last error:' in lines else 0]}"


def watch(folder: Path, steps: Callable[[], int]) -> None:
    """Note how this process ends by itself: at its program's end, or by an exception."""
    failed = False
    process = os.getpid()
    previous = sys.excepthook

    def note(prefix: str, **more: str) -> None:
        # OSError: the folder is gone.
        with suppress(OSError):
            entry = {"time": time.time(), "rank": rank(), "steps": steps(), **more}
            (folder / f"{prefix}{os.getpid()}").write_text(json.dumps(entry))

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
        nonlocal failed
        failed = True
        text = "".join(traceback.format_exception(kind, error, trace))
        note(FAILED_PREFIX, error=_in_a_line(kind, error), trace=text)
        previous(kind, error, trace)

    def at_end() -> None:
        if not failed and steps() and os.getpid() == process:
            note(ENDED_PREFIX)

    sys.excepthook = hook
    atexit.register(at_end)


def end(folder: Path) -> NoReturn:
    """End this process with exit code 0, when all ranks have made their last step.

    A rank that ends earlier would close connections that others still use. The program's code
    does not run on: it would evaluate, and write files.
    """
    (folder / f"{DONE_PREFIX}{rank()}").touch()
    until = time.monotonic() + WAIT
    while len(list(folder.glob(f"{DONE_PREFIX}*"))) < world() and time.monotonic() < until:
        time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
