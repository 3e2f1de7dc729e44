"""End a rank whose launcher has died, and say why ranks that wait for a lost rank end."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from multigpu.errors import UserError, connection_lost

POLL_INTERVAL = 0.2  # seconds
# Seconds that a rank without a launcher has to save. If another rank hangs, it cannot save,
# and the guard ends it.
GRACE = 20.0
# What adopts a process whose parent has died, beside process 1.
REAPERS = ("systemd", "slurmstepd", "tini", "dumb-init", "docker-init", "catatonit")


class Guard:
    """Watches this process's parent: the launcher.

    If a launcher is killed, its ranks go on, and a new start would train beside them. So when
    the parent ends, the guard sends SIGTERM to this process, and ends it GRACE seconds later
    if it is still there. Threads of Python run also while the main thread waits in a
    collective.
    """

    def __init__(self, grace: float = GRACE):
        self.grace = grace
        self.parent = os.getppid()

    def start(self) -> None:
        """Begin to watch, if torchrun started this process.

        It ends this process at once if torchrun has died already.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        if _adopted(self.parent):
            self._end("before the rank was ready")
        threading.Thread(target=self._watch, daemon=True, name="guard").start()

    def _watch(self) -> None:
        while os.getppid() == self.parent:
            time.sleep(POLL_INTERVAL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.grace)
        self._end(f"and the rank could not save within {self.grace:.0f} s")

    def _end(self, circumstance: str) -> None:
        rank = os.environ.get("RANK", "0")
        print(
            f"error: torchrun of rank {rank} has died {circumstance}: start the run again, "
            f"it goes on from its newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _adopted(parent: int) -> bool:
    """Whether torchrun started this process and ended before it could be watched.

    In a container torchrun itself can be process 1: its name is then Python's or torchrun's.
    """
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return False
    is_first = parent == 1 and not name.startswith(("python", "torchrun", "pt_main"))
    return is_first or name in REAPERS


@contextmanager
def report_lost_ranks() -> Iterator[None]:
    """Raise UserError if a collective fails because another rank is lost.

    It is a context, and a decorator of a function.

    gloo reports at once that a rank has ended. A rank that hangs is reported when the process
    group's timeout has passed. After a UserError or a RuntimeError SIGTERM ends this process
    again, even if the program has installed a handler: the launcher sends it to the other
    ranks.
    """
    try:
        yield
    except (UserError, RuntimeError) as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reason = None if isinstance(error, UserError) else _why_lost(error)
        if reason is None:
            raise
        rank = os.environ.get("RANK", "0")
        raise UserError(
            f"rank {rank} ends, because {reason}: the run goes on from its newest checkpoint "
            f"when torchrun, or the same command, starts the ranks again."
        ) from None


def _why_lost(error: BaseException) -> str | None:
    # A DistNetworkError: the process that has the store has ended.
    if connection_lost(error) or isinstance(error, dist.DistNetworkError):
        return "another rank has ended"
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return "another rank did not answer within --timeout"
    return None
