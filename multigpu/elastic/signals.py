"""Signals of an elastic run: noted at any line, obeyed by all ranks after the same step."""

import math
import signal
import sys
import time
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from multigpu.elastic.checkpoints import Checkpoints
from multigpu.errors import UserError

# Seconds in which torchrun's own SIGTERM reaches a rank, after it has reached another one.
OWN_SIGNAL_WAIT = 5.0

_received: signal.Signals | None = None


class Stop(Exception):
    """All ranks raise Stop(signal) after the same step, when one has received a signal."""


def note(number: int, frame: FrameType | None = None) -> None:
    """The handler. It can run in the middle of an update, so it only sets a flag."""
    global _received
    _received = signal.Signals(number)


def add_up(number: torch.Tensor) -> tuple[float, signal.Signals | None]:
    """The sum of `number` over all ranks, and the signal for which all ranks must stop.

    Both are the same on every rank. The signal is SIGTERM if a rank has received it or
    SIGINT, else SIGUSR1 if a rank has received that, else None. Raises UserError if the sum,
    such as a loss, is not finite: nothing after that is worth a checkpoint.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=number.device)
    sums[0] = number
    sums[1] = _received == signal.SIGUSR1
    sums[2] = _received in (signal.SIGTERM, signal.SIGINT)
    dist.all_reduce(sums)
    total, with_usr1, with_term = sums.tolist()
    if not math.isfinite(total):
        raise UserError(
            f"the loss is {total}: lower --lr. The earlier checkpoints are untouched.",
            already_reported=dist.get_rank() != 0,
        )
    if with_term:
        return total, signal.SIGTERM
    return total, signal.SIGUSR1 if with_usr1 else None


class Run(Protocol):
    """A run as `leave` needs it."""

    checkpoints: Checkpoints
    position: Any  # has steps

    def save(self) -> None:
        """Save a checkpoint of the run as it is."""


def leave(stop: Stop, run: Run, end_on_term: bool) -> None:
    """Save the run, and end this rank with the exit code that its launcher needs.

    Rank 0 says whether the checkpoint was written. The code is 0 after SIGUSR1: the function
    returns, and the job can be requeued. It is 143 after SIGTERM, which torchrun sends to its
    ranks before it starts them again in a new world. Each torchrun does so for its own ranks:
    a rank that ended with 0 before that would look finished. With `end_on_term`, for a Slurm
    job, it is 0, too: there Slurm sends SIGTERM, and torchrun must not start the ranks again.
    """
    (number,) = stop.args
    run.save()
    run.checkpoints.wait()
    if run.checkpoints.writer is not None:
        steps = run.position.steps
        kept = "saved" if run.checkpoints.writer.saved == steps else "not saved"
        print(
            f"{number.name} after step {steps}: {kept}. The same command goes on from the "
            f"newest checkpoint.",
            flush=True,
        )
    if number == signal.SIGUSR1 or end_on_term:
        return
    deadline = time.monotonic() + OWN_SIGNAL_WAIT
    while _received is None and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit(128 + signal.SIGTERM)
