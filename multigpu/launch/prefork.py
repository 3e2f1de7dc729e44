"""A server process that has imported torch, and forks the ranks of `call` in a notebook.

A new process imports torch and torch._dynamo for some seconds before it computes. A fork of
the server has them at once.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

# torch sets it when code first asks for its folder; a fork would choose the same value.
SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
# scikit-learn sets them at its import, for OpenMP of Intel and LLVM; so does one in a fork.
SET_BY_SKLEARN = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")

_environment: dict[str, str] | None = None  # the server's; None while there is no server


def start_server() -> None:
    """Start the server, on Linux. Return at once, while it imports; it ends with this process.

    A second call does nothing.
    """
    global _environment
    if _environment is not None or sys.platform != "linux":
        return
    multiprocessing.set_forkserver_preload(["multigpu.launch.preloaded"])
    # Ctrl-C does not end the server. A rank unblocks SIGINT when its function begins.
    with sigint_blocked():
        forkserver.ensure_running()
    _environment = _variables()


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Processes that start in the block start with SIGINT blocked."""
    # If multiprocessing starts its tracker in the block, it unblocks SIGINT.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_method() -> str:
    """How multiprocessing starts a rank: "forkserver", or "spawn" for a new process.

    A fork has the server's variables, so it is used only if they have not changed since.
    """
    return "forkserver" if _environment == _variables() else "spawn"


def _variables() -> dict[str, str]:
    """This process's environment, without what torch and scikit-learn set themselves."""
    set_by_libraries = {SET_BY_TORCH, *SET_BY_SKLEARN}
    return {name: value for name, value in os.environ.items() if name not in set_by_libraries}
