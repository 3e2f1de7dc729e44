"""How does `python train.py` become several ranks? The script is started again, once for each further rank.

This process becomes rank 0. The others run the same file from its first line, find their place in the environment, and
meet rank 0 where it calls `fit`.
"""

import atexit
import os
import subprocess
import sys
import time

import torch.distributed as dist

from multigpu.errors import ENDINGS, UserError
from multigpu.ranks import Ranks

_held: list = []  # the store lives as long as this process


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
        rank: {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(1, processes)
    }
    ranks = Ranks(command, others)
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    ranks.watch(_leave)
    _end_with(ranks)


def _command() -> list[str]:
    """What started this process: python and its options, the file or `-m module`, and the script's arguments."""
    main = sys.modules["__main__"]
    if not getattr(main, "__file__", None) or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise UserError(
            "strategy='ddp' starts the script again for each rank, and here is no script: in a notebook or at a prompt "
            "give strategy='ddp_notebook'."
        )
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", name, *sys.argv[1:]]
    return [sys.executable, *subprocess._args_from_interpreter_flags(), os.path.abspath(main.__file__), *sys.argv[1:]]


def _leave(rank: int, code: int) -> None:
    """A rank has died: this process waits for it in a collective, so nothing but leaving helps.

    Not by sys.stderr: torch catches that while an exception is told, and here is a thread.
    """
    print(f"error: rank {rank} ended with exit code {code}, and the run ends with it: look for its message above.", file=sys.__stderr__, flush=True)  # fmt: skip
    sys.stdout.flush()
    os._exit(code)


def _end_with(ranks: Ranks) -> None:
    """Rank 0's end is the run's: after a fault the others are ended, else they are waited for."""
    theirs = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: object) -> None:
        # A rank that dies breaks rank 0's connection: then its traceback is the news, and the watch ends this process.
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not issubclass(kind, KeyboardInterrupt):
            if ranks.failed():
                time.sleep(60)
            time.sleep(0.05)
        ranks.end()
        theirs(kind, error, trace)

    sys.excepthook = told
    ENDINGS.append(ranks.end)
    # Waiting for a minute: they do after `fit` what this process does.
    atexit.register(lambda: (ranks.wait(60), ranks.end()))
