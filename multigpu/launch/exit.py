"""How a process of a run ends: its exit code, and gloo's threads, which must end before Python does."""

import atexit
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import NoReturn

from multigpu.errors import UserError, tell

PIPE_CLOSED = (
    128 + signal.SIGPIPE
)  # the reader closed the pipe, as in `… | head`: exit silently


def exit_code(main: Callable[..., None], args: object) -> int:
    """The exit code of `main`: torchrun's `record` sees our faults, not the user's."""
    from torch.multiprocessing import ProcessRaisedException

    try:
        main(args)
    except UserError as error:
        return report(error)
    except (
        ProcessRaisedException
    ) as failure:  # from a script's own mp.spawn: the rank's traceback, as text
        if not (sentence := users_sentence(failure.msg)):
            raise
        return report(UserError(sentence))
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(sys.stdout.fileno(), 0)
        if not stdout.poll(0):
            raise  # another pipe's, or a socket's
        return PIPE_CLOSED
    return 0


def users_sentence(trace: str) -> str:
    """The sentence of the UserError with which a traceback ends; "" if it is another fault."""
    name, _, sentence = (trace.strip().splitlines() or [""])[-1].partition(": ")
    return sentence if name == f"{UserError.__module__}.{UserError.__name__}" else ""


def report(error: UserError) -> int:
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

        for function in (
            part for part in vars(module).values() if isinstance(part, FunctionType)
        ):
            kept = function.__defaults__ or ()
            function.__defaults__ = tuple(
                None if isinstance(value, ProcessGroup) else value for value in kept
            )


def leave(code: int) -> NoReturn:
    """End this process without taking the interpreter apart: an error may have left a group open (see `end_gloo`)."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
