"""New processes on this machine: `spawn` runs a function in several ranks, `call` also returns what each rank returned."""

import copyreg
import importlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from multigpu.errors import UserError
from multigpu.launch.exit import PIPE_CLOSED, leave, users_sentence
from multigpu.launch.world import LAUNCHERS, World, by_srun, find, integer


def spawn(function: Callable[..., None], processes: int, *args: object) -> int:
    """Run `function(*args)` in `processes` processes of this machine, with torchrun's variables set; the exit code.

    The first rank that fails ends the others. What it died of goes to stderr: its traceback, or the signal.
    `function` must be importable in a new process: defined at the top level of a script or a module.
    """
    code, reason = _spawn(function, processes, args)
    if reason:
        print(reason, file=sys.stderr)
    return code


def call(
    function: Callable[..., object], processes: int, *args: object, **keywords: object
) -> list:
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
        copyreg.pickle(
            type(module), lambda module: (importlib.import_module, (module.__name__,))
        )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, args, keywords)))
        code, reason = _spawn(_by_value, processes, (folder,))
        if code:
            if sentence := users_sentence(reason):
                raise UserError(sentence)
            if reason and not reason.startswith("error: "):
                raise RuntimeError(reason)
            reason = reason.removeprefix("error: ") or f"a rank ended with exit code {code}."
            raise UserError(f"{reason} Look for its message above.")
        return [
            pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(processes)
        ]


def _by_value(folder: str) -> None:
    import cloudpickle

    function, args, keywords = pickle.loads(Path(folder, "call").read_bytes())
    Path(folder, os.environ["RANK"]).write_bytes(
        cloudpickle.dumps(function(*args, **keywords))
    )


def _spawn(function: Callable[..., None], processes: int, args: tuple) -> tuple[int, str]:
    """The exit code, and what to tell of a failure that has not told itself."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    hide_spawn_warnings()
    if processes < 1:
        raise UserError(
            f"{processes} processes were asked for: a run has at least one process."
        )
    if (outer := outer_world()).size > 1:
        raise UserError(
            f"--spawn starts ranks of its own, and {outer.launcher} has started some: use one of the two.",
            already_reported=outer.rank != 0,
        )
    port = integer(os.environ, "MASTER_PORT", 0)
    try:  # held by this parent, so that no other program can take the port before rank 0 does
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError):
        raise UserError(
            f"cannot bind port {port}, which is in use: give another MASTER_PORT, or none."
        ) from None
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


def hide_spawn_warnings() -> None:
    """torch warns of each rank that it ends because another has failed: the failure is the news."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


def _child(
    local_rank: int, function: Callable[..., None], processes: int, port: int, args: tuple
) -> None:
    os.environ.update(
        RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        MULTIGPU_LAUNCHER="--spawn",
    )  # fmt: skip
    function(*args)
    leave(0)


def outer_world() -> World:
    """Which ranks has a launcher started already? In the shell of a Slurm job none, though its variables count them."""
    if {name for _, *names in LAUNCHERS for name in names} & set(os.environ):
        return find()
    tasks = integer(os.environ, "SLURM_STEP_NUM_TASKS", 1) if by_srun(os.environ) else 1
    return (
        World(integer(os.environ, "SLURM_PROCID", 0), tasks, launcher="srun")
        if tasks > 1
        else World()
    )
