"""The end of a rank's process: its exit code, and gloo's threads, which must end first."""

import atexit
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import NoReturn

from multigpu.errors import UserError, report

# The exit code if the reader of stdout closed the pipe, as in `… | head`. Nothing is printed.
PIPE_CLOSED = 128 + signal.SIGPIPE
USER_ERROR = 2


# Exceptions that ended this process's program.
_kept: list[BaseException] = []


def keep(error: BaseException) -> None:
    """Keep an exception until the process ends.

    Its traceback holds the frames that hold the process group. Python would free it at the end
    of `except`, and wait for gloo's threads with the GIL, which the threads can need: the
    process would not end (pytorch/pytorch#190489).
    """
    _kept.append(error)


def exit_code(main: Callable[..., None], args: object) -> int:
    """Call `main(args)`; return 0, or 2 after a UserError, or 141 after a closed pipe.

    Any other exception is raised, and torchrun's `record` writes it into the run's error file.
    """
    from torch.multiprocessing import ProcessRaisedException

    try:
        with keep_groups_alive():
            main(args)
    except UserError as error:
        keep(error)
        return report_exit_code(error)
    except ProcessRaisedException as failure:
        # The script called mp.spawn itself, so the rank's exception arrives as text.
        text = user_error_text(failure.msg)
        if not text:
            raise
        return report_exit_code(UserError(text))
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(sys.stdout.fileno(), 0)
        if not stdout.poll(0):
            # Stdout is still open, so another pipe or a socket broke.
            raise
        return PIPE_CLOSED
    return 0


@contextmanager
def keep_groups_alive() -> Iterator[None]:
    """Keep process groups alive until the block ends, even if the block destroys them.

    DDP's C++ code has a reference to its group. If DDP drops the last reference, it waits for
    gloo's threads and holds the GIL, which the threads need: the process can hang. DDP drops
    the last reference if torch.distributed.nn.functional was imported before the group was
    made (see `end_gloo`), for instance by `import torch._dynamo`. This function keeps a
    reference in Python, because Python drops it without the GIL.
    """
    import torch.distributed as dist

    groups: list[dist.ProcessGroup] = []
    original = dist.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        groups.extend(dist.distributed_c10d._world.pg_map)
        original(group)

    dist.destroy_process_group = destroy_process_group
    try:
        yield
    finally:
        dist.destroy_process_group = original


def user_error_text(trace: str) -> str:
    """The text of the UserError at the end of a traceback; "" for any other exception."""
    last_line = (trace.strip().splitlines() or [""])[-1]
    name, _, text = last_line.partition(": ")
    return text if name == f"{UserError.__module__}.{UserError.__name__}" else ""


def report_exit_code(error: UserError) -> int:
    """Print the error, and return the exit code for a UserError."""
    report(error)
    return USER_ERROR


@atexit.register
def end_gloo() -> None:
    """End gloo's threads while Python still runs: drop the references to their groups.

    A gloo thread needs the interpreter to drop the tensors of the last collective. If Python
    is already finalizing, the process aborts with "terminate called without an active
    exception" (pytorch/pytorch#190489). This happens in about one run in a hundred, and more
    often if a run ends soon after a collective, or on a busy machine.

    DDP imports torch.distributed.nn.functional when DDP is first used. In torch 2.13 that
    module keeps the default group in the defaults of its functions, so
    dist.destroy_process_group does not end the threads. The group must be alive until this
    function runs: if DDP dropped the last reference, it would wait for the threads and hold
    the GIL, which the threads need.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    if module is None:
        return
    from torch.distributed import ProcessGroup

    for function in vars(module).values():
        if isinstance(function, FunctionType):
            function.__defaults__ = tuple(
                None if isinstance(value, ProcessGroup) else value
                for value in function.__defaults__ or ()
            )


def exit_process(code: int) -> NoReturn:
    """End this process without finalizing Python, because a group may be open (`end_gloo`)."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
