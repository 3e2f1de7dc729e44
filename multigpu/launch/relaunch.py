"""How does `python train.py` become several ranks? The script is started again, once for each further rank.

This process becomes rank 0. The others run the same file from its first line, find their place in the environment, and
meet rank 0 where it calls `fit`.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

import torch.distributed as dist

from multigpu import launch
from multigpu.errors import ENDINGS, UserError, lost, pluralize
from multigpu.launch.processes import Ranks

_held: list = []  # the store lives as long as this process
_done = threading.Event()  # rank 0 has come to its end

DYING = 10.0  # seconds in which a rank ends whose connection was lost: atexit functions, a busy machine
SHORTLY = 1.0  # and one whose fault this process's own error may be about
SILENT = 5.0  # seconds for which rank 0, which is done, waits without a word


def start_again(processes: int) -> None:
    """Make this process rank 0 of `processes` on this machine, and start the others.

    The run ends as one: a rank that dies ends the others within seconds, and this process with its exit code.
    Raises UserError where there is no file to start again: in a notebook, or at Python's prompt.
    """
    command = _command()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _held.append(store)
    common = {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "MULTIGPU_LAUNCHER": "ddp",
    }  # fmt: skip
    others = {
        rank: {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(1, processes)
    }
    ranks = Ranks(command, others)
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    _end_with(ranks, ranks.watch(_leave))


def _command() -> list[str]:
    """What started this process: python and its options, the file or `-m module`, and the script's arguments."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file in (None, "<stdin>") or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise UserError(
            "strategy='ddp' starts the script again for each rank, and here is no script: write one; in a notebook or at a "
            "prompt give strategy='ddp_notebook'."
        )
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return [
            sys.executable,
            *subprocess._args_from_interpreter_flags(),
            "-m",
            name,
            *sys.argv[1:],
        ]
    return [
        sys.executable,
        *subprocess._args_from_interpreter_flags(),
        os.path.abspath(file),
        *sys.argv[1:],
    ]


def _leave(rank: int, code: int) -> None:
    """A rank has died: this process waits for it in a collective, so nothing but leaving helps.

    Not by sys.stderr: torch catches that while an exception is told, and here is a thread.
    """
    stopped = (
        code == 128 + signal.SIGTERM and _done.is_set()
    )  # by a SIGTERM that all ranks have heeded: no news
    if not stopped:
        print(f"error: rank {rank} ended with exit code {code}, and the run ends with it: look for its message above.", file=sys.__stderr__, flush=True)  # fmt: skip
    sys.stdout.flush()
    os._exit(code)


def _end_with(ranks: Ranks, watcher: threading.Thread) -> None:
    """Rank 0's end is the run's: after a fault the others are ended, else they are waited for."""
    theirs = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            _let_a_failed_rank_speak(ranks, DYING if lost(error) else SHORTLY)
        ranks.end()
        theirs(kind, error, trace)

    told.plain = getattr(theirs, "plain", False)
    sys.excepthook = told
    ENDINGS.append(ranks.end)
    atexit.register(_wait_for, ranks, watcher)


def _let_a_failed_rank_speak(ranks: Ranks, seconds: float) -> None:
    """A rank that dies breaks rank 0's connection: then its traceback is the news, and the watch ends this process.

    The connection breaks first, and its process ends later.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ranks.failed():
            time.sleep(60)
        time.sleep(0.05)


def _wait_for(ranks: Ranks, watcher: threading.Thread) -> None:
    """This process is done. The others may have work of their own after `fit`: it is theirs to end, or Ctrl-C's.

    If one fails, the watch ends this process with its exit code.
    """
    _done.set()
    launch.end_gloo()  # after sys.exit within fit the others still wait for this rank: their connections break now
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    since: float | None = time.monotonic()
    while watcher.is_alive() and not asked:
        watcher.join(0.1)
        if (
            since is not None
            and time.monotonic() > since + SILENT
            and (names := _running(ranks))
        ):
            print(
                f"rank 0 is done, and waits for {names}. Ctrl-C ends the run.",
                file=sys.stderr,
                flush=True,
            )
            since = None
    ranks.end()
    if asked:
        os._exit(128 + asked[0])


def _running(ranks: Ranks) -> str:
    """ "rank 1", or "3 ranks"."""
    numbers = [rank for rank, program in ranks.programs.items() if program.poll() is None]
    return (
        f"rank {numbers[0]}"
        if len(numbers) == 1
        else pluralize(len(numbers), "rank")
        if numbers
        else ""
    )
