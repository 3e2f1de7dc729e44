"""How do the processes of a run start, and how do they end? All at once, and the first failure is the one that is told.

Which rank a process is, it learns from `find` (world.py), whoever started it.
"""

import argparse
import atexit
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from multigpu.errors import UserError
from multigpu.world import LAUNCHERS, World, by_srun, find, integer

__all__ = ["World", "alone", "find", "spawn", "start"]

PIPE_CLOSED = 128 + signal.SIGPIPE  # `… | head` has read enough: that is a program's end, and no news


def start(main: Callable[..., None], args: argparse.Namespace) -> None:
    """Run `main(args)`: in `args.spawn` new processes if there is such a flag and it is given, else in this process.

    `args.spawn` is a number, or "auto": one process a GPU, or two on the CPU, the fewest that show anything.
    A UserError ends the process with its sentence and exit code 2; torchrun is given the traceback of any other fault.
    """
    from torch.cuda import device_count
    from torch.distributed.elastic.multiprocessing.errors import record

    wanted = getattr(args, "spawn", None)
    try:
        if wanted is None:
            code = record(_caught)(main, args)
        elif wanted != "auto" and not wanted.isdecimal():
            raise UserError(f"--spawn {wanted}: expected a number of processes, or 'auto'.")
        else:
            code = spawn(_ranked, device_count() or 2 if wanted == "auto" else int(wanted), main, args)
    except UserError as error:
        code = _tell(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    _leave(code)


def alone(stem: str) -> World:
    """The world of a script that is one process. Raises UserError where a launcher has started several of it."""
    world = find()
    if world.size > 1:
        raise UserError(
            f"{stem} is one process, and {world.launcher} started {world.size}, which would all do the same: "
            f"start it with `python scripts/{stem}.py`.",
            quiet=world.rank != 0,
        )
    return world


def spawn(function: Callable[..., None], processes: int, *args: object) -> int:
    """Run `function(*args)` in `processes` processes of this machine, with torchrun's variables set; the exit code.

    The first rank that fails ends the others. What it died of goes to stderr: its traceback, or the signal.
    `function` must be importable in a new process: defined at the top level of a script or a module.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    if processes < 1:
        raise UserError(f"--spawn {processes}: a run has at least one process.")
    # In the shell of a Slurm job nobody has started ranks yet, though its variables count them.
    if {name for _, *names in LAUNCHERS for name in names} & set(os.environ):
        outer = find()
    else:
        tasks = integer(os.environ, "SLURM_STEP_NUM_TASKS", 1) if by_srun(os.environ) else 1
        outer = World(integer(os.environ, "SLURM_PROCID", 0) if tasks > 1 else 0, tasks, launcher="srun")
    if outer.size > 1:
        raise UserError(
            f"--spawn starts ranks of its own, and {outer.launcher} has started some: use one of the two.",
            quiet=outer.rank != 0,
        )
    port = integer(os.environ, "MASTER_PORT", 0)
    try:  # held by this parent, so that no other program can take the port before rank 0 does
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError):
        raise UserError(f"cannot bind port {port}, which is in use: give another MASTER_PORT, or none.") from None
    context = mp.spawn(_child, (function, processes, store.port, args), processes, join=False)
    try:
        while not context.join(grace_period=1):
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        if any(process.exitcode == PIPE_CLOSED for process in context.processes):
            return PIPE_CLOSED
        # A rank that dies makes its neighbours fail too, moments later: the oldest traceback is the cause.
        told = [path for path in context.error_files if os.path.exists(path)]
        for path in sorted(told, key=os.path.getmtime)[:1]:
            rank = context.error_files.index(path)
            with open(path, "rb") as file:
                print(f"rank {rank} died, and the run ends with it:\n{pickle.load(file)}", file=sys.stderr)
        code = getattr(failure, "exit_code", 1)
        if not told and code != 2:
            print(f"error: {failure}, and the run ends with it.", file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


def _child(local_rank: int, function: Callable[..., None], processes: int, port: int, args: tuple) -> None:
    os.environ.update(
        RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        MULTIGPU_LAUNCHER="--spawn",
    )  # fmt: skip
    function(*args)


def _ranked(main: Callable[..., None], args: object) -> None:
    _leave(_caught(main, args))


def _caught(main: Callable[..., None], args: object) -> int:
    """The exit code of `main`: torchrun's `record` sees our faults, not the user's."""
    try:
        main(args)
    except UserError as error:
        return _tell(error)
    except BrokenPipeError:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
            raise  # not stdout's pipe
        return PIPE_CLOSED
    return 0


def _tell(error: UserError) -> int:
    if error.quiet:
        time.sleep(10)  # a launcher ends all ranks when the first one leaves: that should be the one that speaks
    else:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


def _leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart.

    gloo's threads may still be dropping the tensors of the last collective, for which they need the interpreter. If it
    is being taken apart, the process aborts: "terminate called without an active exception", with torch 2.13 in one
    run of a hundred, more often the sooner a run ends after a collective.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
