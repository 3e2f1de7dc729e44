"""horovod.run: start ranks from a Python program."""

from collections.abc import Callable
from typing import Any

from multigpu import launch
from multigpu.errors import UserError


def run(
    func: Callable[..., Any],
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
) -> list:
    """Run `func(*args, **kwargs)` in `np` new processes. Returns the results by rank.

    The ranks use gloo or NCCL. Raises UserError for other hosts and for use_mpi.
    """
    is_local = hosts is None or all(
        host.split(":")[0] in ("localhost", "127.0.0.1") for host in hosts.split(",")
    )
    if not is_local:
        raise UserError(
            f"hosts={hosts!r}: run starts ranks on this machine only; start ranks on several "
            f"machines with srun, mpirun or torchrun, and leave run out."
        )
    if use_mpi:
        raise UserError("use_mpi=True is not supported: remove it. For MPI, use mpirun.")
    return launch.call(func, np, *args, **(kwargs or {}))
