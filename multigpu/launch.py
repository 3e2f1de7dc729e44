"""How do the processes of a run start, and how do they end? All at once, and the first failure is the one that is told.

Which rank a process is, it learns from `find` (world.py), whoever started it.
"""

import argparse
import atexit
import copyreg
import importlib
import logging
import os
import pickle
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import NoReturn

from multigpu.errors import UserError, tell
from multigpu.world import LAUNCHERS, World, by_srun, find, integer

__all__ = ["World", "alone", "call", "find", "spawn", "start"]

PIPE_CLOSED = 128 + signal.SIGPIPE  # `… | head` has read enough: that is a program's end, and no news


def start(main: Callable[..., None], args: argparse.Namespace) -> None:
    """Run `main(args)`: in `args.spawn` new processes if there is such a flag and it is given, else in this process.

    `args.spawn` is a number, or "auto": one process a GPU, or two on the CPU, the fewest that show anything.
    A UserError ends the process with its sentence and exit code 2; torchrun is given the traceback of any other fault.
    """
    from torch.cuda import device_count
    from torch.distributed.elastic.multiprocessing.errors import record

    _quiet_spawn()
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
    outer = _outer()
    if outer.size > 1:
        raise UserError(
            f"{stem} is one process, and {outer.launcher} started {outer.size}, which would all do the same: "
            f"start it with `python scripts/{stem}.py`, or as one task.",
            quiet=outer.rank != 0,
        )
    return outer


def _outer() -> World:
    """Which ranks has a launcher started already? In the shell of a Slurm job none, though its variables count them."""
    if {name for _, *names in LAUNCHERS for name in names} & set(os.environ):
        return find()
    tasks = integer(os.environ, "SLURM_STEP_NUM_TASKS", 1) if by_srun(os.environ) else 1
    return World(integer(os.environ, "SLURM_PROCID", 0), tasks, launcher="srun") if tasks > 1 else World()


def spawn(function: Callable[..., None], processes: int, *args: object) -> int:
    """Run `function(*args)` in `processes` processes of this machine, with torchrun's variables set; the exit code.

    The first rank that fails ends the others. What it died of goes to stderr: its traceback, or the signal.
    `function` must be importable in a new process: defined at the top level of a script or a module.
    """
    code, reason = _spawn(function, processes, args)
    if reason:
        print(reason, file=sys.stderr)
    return code


def call(function: Callable[..., object], processes: int, *args: object, **keywords: object) -> list:
    """Run `function(*args, **keywords)` in `processes` processes, with torchrun's variables; what each returned, by rank.

    `function` and its arguments travel by value, and so do the results: `function` may be defined in a cell of a notebook. The
    notebook's variables that it uses travel with it, so let it use few. Raises RuntimeError with the traceback of the
    rank that failed, a rank's UserError as itself, UserError for a rank that ended without either, TypeError where something
    cannot be pickled.
    """
    import cloudpickle
    import torch

    # cloudpickle takes these along where a function uses such a name, as in data.classes, and cannot pickle them.
    for module in (torch.classes, torch.ops):
        copyreg.pickle(type(module), lambda module: (importlib.import_module, (module.__name__,)))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, args, keywords)))
        code, reason = _spawn(_by_value, processes, (folder,))
        if code:
            if sentence := _users(reason):
                raise UserError(sentence)
            if reason and not reason.startswith("error: "):
                raise RuntimeError(reason)
            reason = reason.removeprefix("error: ") or f"a rank ended with exit code {code}."
            raise UserError(f"{reason} Look for its message above.")
        return [pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(processes)]


def _by_value(folder: str) -> None:
    import cloudpickle

    function, args, keywords = pickle.loads(Path(folder, "call").read_bytes())
    Path(folder, os.environ["RANK"]).write_bytes(cloudpickle.dumps(function(*args, **keywords)))


def _spawn(function: Callable[..., None], processes: int, args: tuple) -> tuple[int, str]:
    """The exit code, and what to tell of a failure that has not told itself."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    _quiet_spawn()
    if processes < 1:
        raise UserError(f"{processes} processes were asked for: a run has at least one process.")
    if (outer := _outer()).size > 1:
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
    except KeyboardInterrupt:
        for process in context.processes:
            process.terminate()
        raise
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        if any(process.exitcode == PIPE_CLOSED for process in context.processes):
            return PIPE_CLOSED, ""
        # A rank that dies makes its neighbours fail too, moments later: the oldest traceback is the cause.
        told = sorted(filter(os.path.exists, context.error_files), key=os.path.getmtime)
        code, reason = getattr(failure, "exit_code", 1), ""
        if told:
            rank = context.error_files.index(told[0])
            reason = f"rank {rank} died, and the run ends with it:\n{pickle.loads(Path(told[0]).read_bytes())}"
        elif code != 2:
            reason = f"error: {failure}, and the run ends with it."
        return code if code > 0 else 128 - code, reason
    return 0, ""


def _quiet_spawn() -> None:
    """torch warns of each rank that it ends because another has failed: the failure is the news."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


def _child(local_rank: int, function: Callable[..., None], processes: int, port: int, args: tuple) -> None:
    os.environ.update(
        RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        MULTIGPU_LAUNCHER="--spawn",
    )  # fmt: skip
    function(*args)
    _leave(0)


def _ranked(main: Callable[..., None], args: object) -> None:
    _leave(_caught(main, args))


def _caught(main: Callable[..., None], args: object) -> int:
    """The exit code of `main`: torchrun's `record` sees our faults, not the user's."""
    from torch.multiprocessing import ProcessRaisedException

    try:
        main(args)
    except UserError as error:
        return _tell(error)
    except ProcessRaisedException as failure:  # from a script's own mp.spawn: the rank's traceback, as text
        if not (sentence := _users(failure.msg)):
            raise
        return _tell(UserError(sentence))
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(sys.stdout.fileno(), 0)
        if not stdout.poll(0):
            raise  # another pipe's, or a socket's
        return PIPE_CLOSED
    return 0


def _users(trace: str) -> str:
    """The sentence of the UserError with which a traceback ends; "" if it is another fault."""
    name, _, sentence = (trace.strip().splitlines() or [""])[-1].partition(": ")
    return sentence if name == f"{UserError.__module__}.{UserError.__name__}" else ""


def _tell(error: UserError) -> int:
    tell(error)
    return 2


@atexit.register
def end_gloo() -> None:
    """End gloo's threads while Python still runs. They live as long as anybody holds their group.

    A thread may still be dropping the tensors of the last collective, for which it needs the interpreter. If that is being
    taken apart, the process aborts: "terminate called without an active exception" (pytorch/pytorch#190489), in one run
    of a hundred, more often the sooner a run ends after a collective, or the busier the machine is.

    torch.distributed.nn.functional, which DDP imports late, has the group of that moment as the default of its
    functions (torch 2.13), and so dist.destroy_process_group ends nothing. That is as well until here: were DDP the
    last to hold the group, it would wait for the threads without letting them have the interpreter, for ever.
    """
    if module := sys.modules.get("torch.distributed.nn.functional"):
        from torch.distributed import ProcessGroup

        for function in (part for part in vars(module).values() if isinstance(part, FunctionType)):
            kept = function.__defaults__ or ()
            function.__defaults__ = tuple(None if isinstance(value, ProcessGroup) else value for value in kept)


def _leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart: an error may have left a group open (see `end_gloo`)."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
