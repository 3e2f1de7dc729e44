"""Run a function in several ranks on this machine, and return their results."""

import copyreg
import importlib
import logging
import multiprocessing.process
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from multigpu.errors import Interrupted, UserError, pluralize
from multigpu.launch.exit import (
    PIPE_CLOSED,
    USER_ERROR,
    exit_process,
    keep_groups_alive,
    user_error_text,
)
from multigpu.launch.prefork import sigint_blocked, start_method
from multigpu.launch.processes import GRACE_AFTER_SIGTERM
from multigpu.launch.room import check_memory
from multigpu.launch.world import LAUNCHERS, World, find_world, integer, started_by_srun


def call(
    function: Callable[..., object], processes: int, *args: object, **keywords: object
) -> list:
    """Run `function(*args, **keywords)` in `processes` new processes; return results by rank.

    The processes have torchrun's variables. `function`, its arguments and the results are
    pickled by value, so `function` can be defined in a cell of a notebook. The notebook's
    variables that it uses are pickled too, so it should use few. In a lesson's notebook the
    processes are forks of a server that has imported torch (see `prefork`). If a rank fails,
    the others are ended.

    Raises RuntimeError with the traceback of a failed rank, but a rank's UserError is raised
    as a UserError. Raises UserError if a rank failed without an exception, and TypeError if
    something cannot be pickled.
    """
    import torch

    cloudpickle = _cloudpickle()
    # cloudpickle tries to pickle these modules if a function uses an attribute of the same
    # name, as in dataset.classes, but it cannot.
    for module in (torch.classes, torch.ops):
        copyreg.pickle(
            type(module), lambda module: (importlib.import_module, (module.__name__,))
        )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, args, keywords)))
        code, reason = _spawn(_call_by_value, processes, (folder,), start_method())
        if code:
            raise _call_error(code, reason)
        return [
            pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(processes)
        ]


def _call_error(code: int, reason: str) -> Exception:
    """The exception that `call` raises when a rank failed."""
    if text := user_error_text(reason):
        return UserError(text)
    if reason and not reason.startswith("error: "):
        return RuntimeError(reason)
    reason = reason.removeprefix("error: ") or f"a rank ended with exit code {code}."
    return UserError(f"{reason} Look for its message above.")


def _call_by_value(folder: str) -> None:
    """In a rank: call the pickled function and pickle its result."""
    cloudpickle = _cloudpickle()
    function, args, keywords = pickle.loads(Path(folder, "call").read_bytes())
    result = function(*args, **keywords)
    Path(folder, os.environ["RANK"]).write_bytes(cloudpickle.dumps(result))


def _cloudpickle() -> ModuleType:
    """The module cloudpickle, or the copy of it in joblib, which scikit-learn installs."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        from joblib.externals import cloudpickle
    return cloudpickle


def _spawn(
    function: Callable[..., None], processes: int, args: tuple, method: str = "spawn"
) -> tuple[int, str]:
    """The exit code, and the text to print about a failure that no rank has printed, or "".

    `method` is multiprocessing's: "spawn", or "forkserver" if `prefork` has started a server.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    hide_spawn_warnings()
    if processes < 1:
        raise UserError(
            f"{processes} processes were requested, but a run has at least one process."
        )
    outer = outer_world()
    if outer.size > 1:
        raise UserError(
            f"this program starts ranks itself, but {outer.launcher} has started {outer.size} "
            f"already: start it as one process.",
            already_reported=outer.rank != 0,
        )
    check_memory(processes)
    port = integer(os.environ, "MASTER_PORT", 0)
    # Opened by the parent, so that no other program can take the port before rank 0 does.
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError):
        raise UserError(
            f"cannot bind port {port}, which is in use: set another MASTER_PORT, or unset it."
        ) from None
    child_args = (function, processes, store.port, args)
    others = set(mp.active_children())
    try:
        # A rank that Ctrl-C interrupts before it has imported torch would print a traceback:
        # it receives Ctrl-C when it calls `_run_child`.
        with sigint_blocked():
            context = mp.start_processes(
                _run_child, child_args, processes, join=False, start_method=method
            )
        while not context.join(grace_period=1):
            pass
    except KeyboardInterrupt:
        end_processes(set(mp.active_children()) - others)
        raise Interrupted(
            f"Interrupted: {pluralize(processes, 'rank')} started here "
            f"{'has' if processes == 1 else 'have'} ended. Start again, or go on."
        ) from None
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        if any(process.exitcode == PIPE_CLOSED for process in context.processes):
            return PIPE_CLOSED, ""
        code = getattr(failure, "exit_code", 1)
        reason = _first_traceback(context.error_files)
        if not reason and code != USER_ERROR:
            reason = f"error: {failure}, so the run ends."
        return code if code > 0 else 128 - code, reason
    return 0, ""


def end_processes(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    """Send SIGTERM, and SIGKILL after GRACE_AFTER_SIGTERM seconds or at another Ctrl-C."""
    processes = list(processes)
    deadline = time.monotonic() + GRACE_AFTER_SIGTERM
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _first_traceback(error_files: list[str]) -> str:
    """The oldest of the ranks' tracebacks; "" if there is none.

    A rank that fails makes other ranks fail moments later, so the oldest traceback shows the
    cause.
    """
    written = [path for path in error_files if os.path.exists(path)]
    if not written:
        return ""
    oldest = min(written, key=os.path.getmtime)
    trace = pickle.loads(Path(oldest).read_bytes())
    return f"rank {error_files.index(oldest)} died, so the run ends:\n{trace}"


def hide_spawn_warnings() -> None:
    """Hide torch's warning for each rank that it ends. The failed rank's error is enough."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


def _run_child(
    local_rank: int,
    function: Callable[..., None],
    processes: int,
    port: int,
    args: tuple,
) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        MULTIGPU_LAUNCHER="spawn",
    )
    with keep_groups_alive():
        function(*args)
    exit_process(0)


def outer_world() -> World:
    """The world that a launcher has already started; without one, a world of one process.

    The shell of a Slurm job is one process, although its variables count the job's tasks.
    """
    if any(name in os.environ for _, *names in LAUNCHERS for name in names):
        return find_world()
    if not started_by_srun(os.environ):
        return World()
    tasks = integer(os.environ, "SLURM_STEP_NUM_TASKS", 1)
    if tasks <= 1:
        return World()
    return World(integer(os.environ, "SLURM_PROCID", 0), tasks, launcher="srun")
